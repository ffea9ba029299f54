"""What both conversions share: reading, checking, reporting and writing."""
import argparse
import json
import pathlib
import shutil
import zipfile
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file


class Refused(Exception):
    """The checkpoint cannot be converted; the message says why and what would help."""


def load_pickle(path):
    """The object in a file of torch.save: tensors and plain values only, no code is run.

    Namespaces are let in because training scripts keep their arguments in one.
    """
    options = dict(map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, **options)
    except Exception as error:  # whatever torch finds wrong with the bytes
        raise Refused(f"{path}: cannot be read as tensors: {str(error).splitlines()[0]}") from error


def load_json(path):
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise Refused(f"{path}: is not a JSON object")
    return value


@dataclass
class Report:
    """What became of everything in the source."""
    mapped: list = field(default_factory=list)   # (from, to)
    dropped: list = field(default_factory=list)  # (what, why)
    notes: list = field(default_factory=list)

    def text(self):
        renamed = [(old, new) for old, new in self.mapped if old != new]
        lines = [f"mapped   {len(self.mapped)} tensors, {len(renamed)} under a new name"]
        lines += [f"           {old} -> {new}" for old, new in renamed]
        lines += [f"dropped  {what}: {why}" for what, why in self.dropped]
        lines += [f"note     {note}" for note in self.notes]
        lines += ["left     nothing"]
        return "\n".join(lines)


@dataclass
class Converted:
    config: dict
    tensors: dict
    report: Report


def shape_of(tensors, name, dimensions):
    """The shape of a tensor that must be there."""
    tensor = tensors.get(name)
    if tensor is None:
        raise Refused(f"tensor {name} is missing")
    if tensor.dim() != dimensions:
        raise Refused(f"tensor {name} has shape {list(tensor.shape)}; {dimensions} dimensions expected")
    return tuple(tensor.shape)


def count_layers(tensors, prefix):
    """Layers are numbered from 0 without a gap."""
    numbers = {int(name[len(prefix):].split(".")[0]) for name in tensors
               if name.startswith(prefix) and name[len(prefix):].split(".")[0].isdigit()}
    if not numbers or numbers != set(range(len(numbers))):
        raise Refused(f"tensors {prefix}0... to {prefix}{max(numbers, default=0)}... do not make a "
                      "whole stack of layers")
    return len(numbers)


def check_tensors(tensors, expected):
    """Every tensor must be expected, in the shape that follows from the sizes, and a number type."""
    faults = []
    for name, shape in expected.items():
        if name not in tensors:
            faults.append(f"{name} is missing")
        elif tuple(tensors[name].shape) != tuple(shape):
            faults.append(f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
        elif tensors[name].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            faults.append(f"{name} has dtype {tensors[name].dtype}; float32, bfloat16 and float16 "
                          "can be served")
    faults += [f"{name} is not known" for name in tensors if name not in expected]
    if faults:
        more = [f"and {len(faults) - 20} more"] if len(faults) > 20 else []
        raise Refused("tensors do not fit the model: " + "; ".join(faults[:20] + more))


def write(out, converted, tokenizer=None):
    """Writes the folder, which must be new or empty; complete, or not at all."""
    out = pathlib.Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out}: is there already and not an empty folder")
    part = out.with_name(out.name + ".part")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    try:
        # Copies: tensors that share memory cannot be stored, and mapped ones must outlive the file.
        tensors = {name: tensor.detach().clone().contiguous()
                   for name, tensor in converted.tensors.items()}
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(converted.config, indent=2) + "\n",
                                          encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, part / "tokenizer.json")
        if out.exists():
            out.rmdir()
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
