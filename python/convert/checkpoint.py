"""Which files of a Hugging Face folder hold which tensors.

safetensors is preferred to .bin. With an index, the index decides: every shard it names must be there and hold what it says, so
that a missing or foreign shard is told before any work. Without one, all files of the usual names are taken together.
"""

import json

from .errors import ConvertError
from .pickles import read_pickle
from .safetensors import read_safetensors

KINDS = (("model", ".safetensors", read_safetensors), ("pytorch_model", ".bin", read_pickle))


def load_json(path):
    """All the JSON files of such folders hold one object."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a character, which no UTF-8 file can hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, OSError, RecursionError) as error:
        raise ConvertError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{path} should hold a JSON object and does not; fetch it again")
    return value


def find_weights(folder):
    """(kind, shard paths, index or None); raises nothing. kind is None where there are no weights."""
    for kind in KINDS:
        prefix, suffix, _ = kind
        index = folder / f"{prefix}{suffix}.index.json"
        if index.is_file():
            weight_map = load_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise ConvertError(f"{index} has no weight_map from tensors to files; fetch it again")
            return kind, [folder / name for name in sorted(set(weight_map.values()))], weight_map
        shards = sorted(path for path in folder.glob(f"{prefix}*{suffix}") if path.is_file())
        if shards:
            return kind, shards, None
    return None, [], None


def missing_weights(folder):
    """What is missing, as a list of phrases; empty where all shards are there."""
    kind, shards, index = find_weights(folder)
    if kind is None:
        return ["the weights (model.safetensors, its shards with model.safetensors.index.json, or pytorch_model*.bin)"]
    missing = [path.name for path in shards if not path.is_file()]
    if index is None:  # the names of shards tell how many there should be
        for path in shards:
            part = path.name[: -len(kind[1])].split("-of-")
            if len(part) == 2 and part[1].isdigit():
                digits, stem = len(part[1]), part[0].rpartition("-")[0]
                names = [f"{stem}-{i:0{digits}}-of-{part[1]}{kind[1]}" for i in range(1, int(part[1]) + 1)]
                missing += [name for name in names if not (folder / name).is_file()]
    return sorted(set(missing))


def open_checkpoint(folder):
    """All tensors of a folder by name."""
    (_, _, reader), shards, index = find_weights(folder)
    tensors, homes = {}, {}
    for shard in shards:
        for name, tensor in reader(shard).items():
            if name in tensors:
                raise ConvertError(f"tensor {name} is in both {homes[name]} and {shard.name}; leave only one set of files there")
            tensors[name], homes[name] = tensor, shard.name
    if index is not None:
        lost = sorted(name for name, home in index.items() if homes.get(name) != home)
        if lost:
            raise ConvertError(f"the index names tensors that their files do not hold: {shorten(lost)}; fetch index and files "
                               "again")
    return tensors


def shorten(names, limit=8):
    """A list for a message: the first few, and how many more."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
