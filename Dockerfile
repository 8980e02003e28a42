# d2_memfit with PyTorch and Detectron2 v0.6, as `make venv` makes them:
#
#     docker build -t d2_memfit .
#     docker run --rm --gpus all --ipc host -v "$PWD:/work" d2_memfit \
#         plan --config-file COCO-Detection/retinanet_R_50_FPN_3x --card 6GB --output plan.yaml
#
# The packages of PyTorch bring CUDA. The host needs the driver and NVIDIA's container toolkit.
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/d2_memfit
RUN make -C /opt/d2_memfit venv VENV=/opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["d2-memfit"]
