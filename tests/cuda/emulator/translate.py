"""Writes a .cu or .cuh file as C++ for the emulator: launches and dynamic shared memory become calls.

    python3 translate.py INPUT OUTPUT
"""
import re
import sys

LAUNCH = re.compile(r"(\b\w+(?:<[\w, ]+>)?)\s*<<<(.*?)>>>\s*\((.*?)\);", re.DOTALL)
DYNAMIC = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")


def launch(match):
    kernel, configuration, arguments = match.groups()
    parts, depth = [""], 0
    for letter in configuration:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    grid, block = parts[0], parts[1]
    shared = parts[2] if len(parts) > 2 else "0"
    return f"emulator::Launch({grid}, {block}, {shared}, [&] {{ {kernel}({arguments}); }}); (void)stream;"


def main():
    source = open(sys.argv[1], encoding="utf-8").read()
    source = DYNAMIC.sub(r"\1* \2 = static_cast<\1*>(emulator::DynamicShared());", source)
    source = LAUNCH.sub(launch, source)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(f'#line 1 "{sys.argv[1]}"\n' + source)


if __name__ == "__main__":
    main()
