# Copyright (c) the d2_memfit developers.
"""The sentences that tests/prose.txt has."""


def test_each_sentence_is_asked_for(request):
    assert not request.config.unasked, "make prose leaves them out"
