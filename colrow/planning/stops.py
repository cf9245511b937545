"""Stops: in words, why a model's own code ended where it was followed without numbers. Not here: where that was (record.py)."""

from __future__ import annotations

import re

SIZES = r"\[[-\d, ]+\]|(?<=size )\d+"
SHOWN = r"[\s,;:(]*\b\w*:?\s*tensor\(.*"  # a tensor as Python shows it, and what names it


def words(error: Exception) -> str:
    """Of what the code raised. Messages of models are quoted, those of torch are not, where it is known what they mean."""
    said = str(error).splitlines()[0].rstrip(". ") if str(error) else ""
    if isinstance(error, LookupError | AttributeError) and "device='meta'" in said:
        return "the model's code chooses something by a name that it makes of a tensor's number"
    if isinstance(error, RuntimeError) and "meta" in said and "device" in said:
        return "the model's code makes a tensor of numbers of its own, to be used with others that have only shapes here"
    sizes = dict.fromkeys(re.findall(SIZES, said))
    if isinstance(error, RuntimeError) and len(sizes) > 1:  # of one alone, what it does not fit to is said in other words
        return f"sizes of the model's config, or of the input that was made up for it, do not fit together: {' and '.join(sizes)}"
    if isinstance(error, ValueError | AssertionError) and (text := re.sub(SHOWN, "", said)):
        return f'the model refuses the input that was made up for it: "{text}"'
    return f"the model's code stops with {type(error).__name__}" + (f" ({said})" if said else "")
