"""The results that a report is made of: read, checked, and named so that they can be told apart.

Invariant: a result that read_result returns has all that the report uses, so nothing after it asks whether a number is there.

A shape is a type (float: any number that a float holds), a list of one shape for all its members, or an object of shapes. Such a list has at
least one member, and [..., None] allows null in it; a key that ends in "?" may be missing or null.
"""
import json
import os
import pathlib

CHECK = {"name": str, "value": float, "threshold": float, "pass": bool}
SIDE = {"text": str}
MAP = {"kept": [[float]], "lanes": [[float]], "mass_kept": [float, None]}
SETTING = {"name?": str, "evict?": str, "kept_share": float}
SHAPES = {  # of a row of "settings", or of the result itself where it has none
    "kld": {**SETTING, "kld": float, "kld_error?": float, "top1": float, "nll": float, "nll_full": float, "chunks": list,
            "map?": MAP},
    "needle": {**SETTING, "accuracy": float, "accuracy_full": float, "samples": list},
    "ab": {"exact_match": float, "rouge_l": float, "rouge_l_error?": float, "token_agreement": float, "speedup": float,
           "kv_share": float, "verdict?": {"pass": bool, "checks": [CHECK]},
           "samples": [{"line": float, "exact_match": bool, "rouge_l": float, "token_agreement": float, "off": SIDE, "on": SIDE}]},
    "tasks": {"tasks": [{"name": str, "metric": str, "n": float, "score_off": float, "score_off_error": float, "score_on": float,
                         "score_on_error": float, "difference": float, "difference_error": float, "kv_share": float,
                         "samples": [{"sample": float, "score_off": float, "score_on": float, "answers": [str], "off": str,
                                      "on": str}]}]},
}
COMMON = {"model": str, **{key + "?": str for key in ("eviction", "kv_type", "prefill", "evict", "question")}}
OF_A_CONTEXT = {"context": float, "mass?": [[float], None]}  # kld and needle, which may have several settings
EXTRAS = ("kv_type", "evict", "question", "prefill", "context", "model")


WHOLE = 2**53  # from here on a float leaves whole numbers out, and what plots makes objects of those that no 64 bits hold


class BadResult(Exception):
    """The text says which file, and what is wrong with it."""


def faults(value, shape, place):
    """The places that are not as the shape says."""
    if isinstance(shape, dict) and isinstance(value, dict):
        for key, inner in shape.items():
            name = key.rstrip("?")
            if name == key or value.get(name) is not None:
                yield from faults(value.get(name), inner, f"{place}.{name}" if place else name)
    elif isinstance(shape, list) and isinstance(value, list) and value:
        for i, item in enumerate(value):
            if item is not None or None not in shape:
                yield from faults(item, shape[0], f"{place}[{i}]")
    elif isinstance(shape, (dict, list)):
        yield place
    elif not (isinstance(value, (int, float)) and abs(value) < (1e300 if isinstance(value, float) else WHOLE) if shape is float
              else isinstance(value, shape)):
        yield place


def read_result(path, label=""):
    """A result with its label; "settings" always a list of rows, of which ab and tasks have one: the result."""
    try:
        result = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadResult(f"{path} can't be read: {error}") from error
    if not isinstance(result, dict) or result.get("command") not in list(SHAPES):
        raise BadResult(f"{path} is no result of deeptutor-eval kld, needle or ab (their --json), nor of tasks.py")
    command, shape = result["command"], SHAPES[result["command"]]
    if command in ("kld", "needle"):
        shape = {**OF_A_CONTEXT, **({"settings": [shape]} if "settings" in result else shape)}
    fault = next(faults(result, {**COMMON, **shape}, ""), None)
    if fault:
        raise BadResult(f"{path} is no whole result of {command}: {fault} is missing, or not what it should be")
    result.update(label=label, stem=pathlib.Path(path).stem)
    result["settings"] = result.get("settings", [result])
    return result


def extra(result, row, key):
    """How a row of a file of settings evicts, it says itself, if anything does: the result's "evict" is only what flags said."""
    value = os.path.basename(result["model"]) if key == "model" else (row if key == "evict" and "name" in row else result).get(key)
    return "" if value is None else str(value)


def name_series(results):
    """Gives the rows of all results of one command the "series" they belong to. Rows of a file of settings go by their names,
    behind the result's where there are several such results; others by what was evicted how, or by LABEL. Then what differs."""
    lines = [(result, row) for result in results for row in result["settings"]]
    several = sum("name" in result["settings"][0] for result in results) > 1
    differing = [key for key in EXTRAS if len({extra(*line, key) for line in lines}) > 1]
    for result, row in lines:
        if "name" in row:
            names = [result["label"] or (result["stem"] if several else ""), row["name"]]
        else:
            names = [result["label"] or result.get("eviction") or result["stem"]]
        extras = [text for text in (extra(result, row, key) for key in differing) if text]
        row["series"] = ": ".join(filter(None, names)) + (f" ({', '.join(extras)})" if extras else "")


def series_of(results, value, error=None):
    """{series: [(kept, value, error)]}"""
    series = {}
    for result in results:
        for row in result["settings"]:
            series.setdefault(row["series"], []).append((row["kept_share"], row[value], row.get(error) or 0.0))
    return series
