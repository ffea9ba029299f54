"""Fails if an include turns left, or a heavy library is used outside its home.

main -> rpc, gateway -> serving -> explain -> model -> kernels -> base, and serving -> observe -> base.
"""
import pathlib
import re
import sys

MAY_INCLUDE = {
    "base": set(),
    "observe": {"base"},
    "kernels": {"base"},
    "model": {"kernels", "base"},
    "explain": {"model", "kernels", "base"},
    "serving": {"explain", "model", "kernels", "observe", "base"},
    "rpc": {"serving", "explain", "model", "kernels", "observe", "base"},
    "gateway": {"serving", "explain", "model", "kernels", "observe", "base"},
}
# Library -> the folders that may include it; in "model" and "explain" LibTorch stays in .cc files.
HOMES = {
    r"(ATen|torch|c10)/": {"model", "explain"},
    r"(grpcpp|grpc)/(?!health)": {"rpc"},
    r".*\.grpc\.pb\.h": {"rpc"},
    r"prometheus/": {"observe"},
    r"httplib\.h": {"gateway"},
    r"blis\.h": {"kernels"},
    r"hwy/": {"kernels"},
    r"(cuda|cublas|cooperative_groups)": {"kernels"},
    r"nlohmann/": {"model", "observe"},
    r"(png|jpeglib|jerror)\.h": {"model"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]')


def faults_of(path, folder, root):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        target, place = match.group(1), f"{path.relative_to(root)}:{number}"
        ours = re.match(r"server/([a-z]+)/", target)
        if ours and ours.group(1) != folder and ours.group(1) not in MAY_INCLUDE[folder]:
            yield f"{place}: {folder} may not include {target}"
        if re.match(r"(client|tests)/", target):
            yield f"{place}: server code may not include {target}"
        for library, homes in HOMES.items():
            if re.match(library, target) and folder not in homes:
                yield f"{place}: {target} belongs in {', '.join(sorted(homes))}"
        if path.suffix == ".h" and re.match(r"(ATen|torch|c10)/", target):
            yield f"{place}: LibTorch stays out of headers"


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    faults = []
    for folder in MAY_INCLUDE:
        files = sorted((root / "server" / folder).rglob("*"))
        for path in files:
            if path.suffix in {".h", ".cc", ".cu", ".cuh", ".inc"}:
                faults += faults_of(path, folder, root)
    unknown = {p.name for p in (root / "server").iterdir() if p.is_dir()} - MAY_INCLUDE.keys()
    faults += [f"server/{name}: unknown folder; give it its place in {__file__}" for name in unknown]
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
