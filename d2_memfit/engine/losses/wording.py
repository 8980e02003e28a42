# Copyright (c) the d2_memfit developers.
"""Log lines about the rules of losses."""

import logging
import math
from collections.abc import Mapping, Sequence

from .rules import CLOSE, EXACT, NOT_KNOWN, OTHER, Rules, Term

__all__ = ["HELP", "complaint_about", "log_rules"]

logger = logging.getLogger(__name__)

HELP = "docs/ACCUMULATION.md#what-losses-are-divided-by"


def log_rules(
    rules: Rules, changed: Sequence[str], forwards: int, seconds: float, said: set[str]
) -> None:
    """Log the word for each loss, and what forwards change in the model.

    Args:
        changed: names of it.
        forwards, seconds: what the test took.
        said: names of losses that were warned about, to which new ones are added.
    """
    words = []
    for word in (EXACT, CLOSE, OTHER, NOT_KNOWN):
        of_word = {name: term for name, term in rules.terms.items() if term.word == word}
        if of_word:
            worst = max(term.distance for term in of_word.values())
            figure = "" if word == NOT_KNOWN else f" (up to {worst:.1g})"
            words.append(f"{word}{figure}: {', '.join(of_word)}")
    logger.info(
        "Gradients of micro-batches were compared with those of one forward, with %d forwards of "
        "an image in %.1f s. %s%s",
        forwards,
        seconds,
        "; ".join(words),
        f"; with {rules.left_out}" if rules.left_out else "",
    )
    if changed:
        logger.info(
            "A forward changes %s, so an iteration changes it once per micro-batch",
            ", ".join(changed),
        )
    if bad := sorted(rules.not_finite - said):
        logger.warning(
            "%s: not finite for an image without labels, if it is a micro-batch of its own, and "
            "that ends a run. Sum over the labels, and divide by "
            "d2_memfit.window_count(number of labels)",
            ", ".join(bad),
        )
    new = {k: t for k, t in rules.terms.items() if t.word in (OTHER, NOT_KNOWN) and k not in said}
    for why in dict.fromkeys(term.why for term in new.values()):
        of_why = {name: term for name, term in new.items() if term.why == why}
        logger.warning("%s. See %s", complaint_about(of_why), HELP)
    said.update(bad, new)


def complaint_about(terms: Mapping[str, Term]) -> str:
    """Losses that are wrong for one reason, with their distance and a remedy, in one line."""
    term = max(terms.values(), key=lambda t: t.distance)
    names = ", ".join(terms)
    if term.word == NOT_KNOWN:
        return f"{names}: not known ({term.why})"
    by = f"{term.distance:.2g} of the gradient" if math.isfinite(term.distance) else "not finite"
    return f"{names}: other, {by} in micro-batches: {term.why}"
