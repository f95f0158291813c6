"""Check that all ranks of a group make the same call, before they exchange anything.

Ranks compare texts through their process group's store. A rank that is missing or differs causes
an error rather than a collective that hangs.
"""

from __future__ import annotations

import collections

from flexhop.compat import collectives
from flexhop.errors import RankDisagreementError

_known: set[tuple[str, str, str]] = set()
_comparisons: collections.Counter[str] = collections.Counter()


def agree(subject: str, text: str, group: str, hint: str) -> None:
    """Compare a text with the other ranks', once per text.

    Args:
        subject: subject of the text, for the error.
        text: what this rank calls with.
        group: name of the process group; all its ranks call this.
        hint: how to fix a difference.

    Raises:
        RankDisagreementError: another rank's text differs, or does not arrive in time.
    """
    if (group, subject, text) in _known:
        return
    _comparisons[group] += 1
    key = f"{subject}/{_comparisons[group]}"
    texts, missing = collectives.exchange_texts(text, key, group)
    if missing:
        raise RankDisagreementError(
            subject=subject, hint=hint,
            found=f"rank {collectives.rank_in(group)} has {text}, but ranks {missing} did not "
            f"call within {collectives.timeout_of(group)}",
        )  # fmt: skip
    if len(set(texts)) > 1:
        raise RankDisagreementError(subject=subject, found=_by_text(texts), hint=hint)
    _known.add((group, subject, text))


def _by_text(texts: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on rank {_words(found)}" for text, found in ranks.items())


def _words(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
