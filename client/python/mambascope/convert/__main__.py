"""python -m mambascope.convert SOURCE OUT: see --help."""
import argparse
import pathlib
import sys

from . import state_spaces, vim
from .checkpoint import Refused, load_json, load_pickle, write

WEIGHTS = "pytorch_model.bin"


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m mambascope.convert",
        description="Turns a checkpoint of the original Mamba code (a folder with config.json and "
                    "pytorch_model.bin) or of Vision Mamba (a .pth file) into a folder that the "
                    "server reads. Checkpoints in Hugging Face's layout are served as they are.")
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, help="a new or empty folder")
    parser.add_argument("--tokenizer", type=pathlib.Path,
                        help="tokenizer.json or a folder with it (default: the source's, if any)")
    vision = parser.add_argument_group("Vision Mamba, where the file does not tell")
    vision.add_argument("--img-size", type=int, help="pixels a side")
    vision.add_argument("--stride", type=int, help="pixels from patch to patch (default: the patch's)")
    vision.add_argument("--class-token", choices=("middle", "first"))
    vision.add_argument("--divide-out", action=argparse.BooleanOptionalAction, default=None,
                        help="whether the sum of both directions is halved")
    return parser.parse_args(argv)


def find_tokenizer(given, source):
    """The path of a tokenizer.json, or None."""
    if given is not None:
        path = given / "tokenizer.json" if given.is_dir() else given
        if not path.is_file():
            raise Refused(f"{path}: there is no such tokenizer")
        return path
    path = source / "tokenizer.json"
    return path if path.is_file() else None


def convert_folder(source, tokenizer):
    if not (source / "config.json").is_file():
        raise Refused(f"{source}: has no config.json")
    config = load_json(source / "config.json")
    if not state_spaces.is_original(config):
        if any(source.glob("*.safetensors")):
            raise Refused(f"{source}: is in Hugging Face's layout with safetensors, which the server "
                          "reads as it is; there is nothing to convert")
        raise Refused(f"{source}/config.json: has no d_model and n_layer, so it is not of the "
                      "original Mamba code")
    if not (source / WEIGHTS).is_file():
        raise Refused(f"{source}: has no {WEIGHTS}")
    return state_spaces.convert(config, load_pickle(source / WEIGHTS),
                                load_json(tokenizer) if tokenizer is not None else None)


def run(arguments):
    source, tokenizer = arguments.source, None
    if source.is_dir():
        tokenizer = find_tokenizer(arguments.tokenizer, source)
        converted = convert_folder(source, tokenizer)
        if tokenizer is None:
            converted.report.notes.append("no tokenizer.json: the server will take token ids only; "
                                          "see --tokenizer")
    elif source.is_file():
        middle = {None: None, "middle": True, "first": False}[arguments.class_token]
        converted = vim.convert(load_pickle(source), arguments.img_size, arguments.stride, middle,
                                arguments.divide_out)
    else:
        raise Refused(f"{source}: there is no such file or folder")
    write(arguments.out, converted, tokenizer)
    print(f"{source} -> {arguments.out}: {converted.config['model_type']}")
    print(converted.report.text())


def main(argv=None):
    try:
        run(parse_arguments(argv))
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
