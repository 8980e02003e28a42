# Copyright (c) the d2_memfit developers.
"""Small detectors' parts as public projects write them."""

import torch
from torch import nn


class Attention(nn.Module):
    """Of a ViT."""

    def __init__(self, dim):
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Block(nn.Module):
    """Of a ViT or a Swin."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class SwinStage(nn.Module):
    def __init__(self, dim, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.reduction = nn.Linear(dim, dim)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.reduction(x)


class ListedLayer(nn.Module):
    """A decoder layer whose parts are in lists, as in detrex."""

    def __init__(self, dim):
        super().__init__()
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(dim, 2, batch_first=True) for _ in range(2)
        )
        self.ffns = nn.ModuleList([nn.Sequential(nn.Linear(dim, 8 * dim), nn.Linear(8 * dim, dim))])

    def forward(self, query, key, value=None, *, memory):
        query = query + self.attentions[0](query, key, value=value)[0]
        query = query + self.attentions[1](query, memory["x"], memory["x"])[0]
        return query + self.ffns[0](query), memory


class SeriesHead(nn.Module):
    """A head of a series, as in Sparse R-CNN; ``towers`` are lists of single layers."""

    def __init__(self, dim):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        layers = (nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(inplace=True))
        self.tower = nn.ModuleList(layers)
        self.logits = nn.Linear(dim, 4)

    def forward(self, x):
        x = x + self.attention(x, x, value=x)[0]
        feature = x
        for layer in self.tower:
            feature = layer(feature)
        return self.logits(feature), x


class MLP(nn.Module):
    """Of a DETR's boxes."""

    def __init__(self, dim):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class ConvNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(dim, dim, 1), nn.BatchNorm1d(dim)

    def forward(self, x):
        return self.norm(self.conv(x))


class Detector(nn.Module):
    """Something of each kind; the same boxes' head for each layer of the decoder."""

    def __init__(self, dim=16):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.stages = nn.ModuleList(SwinStage(dim) for _ in range(2))
        self.vit = nn.Sequential(*[Block(dim) for _ in range(2)])
        self.neck = nn.ModuleList(ConvNorm(dim) for _ in range(2))
        options = {"dim_feedforward": 32, "batch_first": True}
        encoder, decoder = (
            kind(dim, 2, **options)
            for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        )
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.listed = nn.ModuleList(ListedLayer(dim) for _ in range(2))
        self.head_series = nn.ModuleList(SeriesHead(dim) for _ in range(2))
        self.bbox_embed = MLP(dim)
        self.class_embed = nn.ModuleList([nn.Linear(dim, 3), nn.Linear(dim, 3)])

    def forward(self, x):
        """
        Args:
            x: [N, tokens, dim].
        """
        for stage in self.backbone.stages:
            x = stage(x)
        x = self.vit(x)
        for conv in self.neck:
            x = conv(x.transpose(1, 2)).transpose(1, 2)
        memory = self.encoder(x)
        x, boxes = self.decoder(memory, memory), []
        for layer in self.listed:
            x, _ = layer(x, x, value=x, memory={"x": memory})
        for head in self.head_series:
            logits, x = head(x)
            boxes.append(self.bbox_embed(x))
        scores = [embed(x) for embed in self.class_embed]
        return {
            "loss_boxes": torch.stack(boxes).square().mean(),
            "loss_scores": sum(s.square().mean() for s in scores) + logits.square().mean(),
        }
