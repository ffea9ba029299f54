"""Writes the pictures of this folder and what PIL makes of them (PIL 9.4, Debian's python3-pil).

    /usr/bin/python3 tests/golden/image/make.py

expected.safetensors holds, for "<file>/<case>", the 8-bit pixels [size, size, 3] of
open(...).convert("RGB"), resized and cropped as torchvision's Resize and CenterCrop do.
"""
import json
import pathlib
import struct

from PIL import Image

FOLDER = pathlib.Path(__file__).parent
WIDTH, HEIGHT = 61, 43
# size: shortest edge, or [height, width]; 2 = bilinear, 3 = bicubic
CASES = {
    "smaller": dict(size=18, crop=16, resample=3),
    "smaller-bilinear": dict(size=19, crop=16, resample=2),
    "larger": dict(size=57, crop=24, resample=3),
    "exact": dict(size=[20, 20], crop=20, resample=3),
    "across-only": dict(size=[43, 30], crop=21, resample=3),
    "untouched": dict(size=None, crop=24, resample=3),
}


def pixel(x, y):
    """Gradients, an edge and noise, by integer arithmetic alone."""
    noise = (x * 7919 + y * 104729 + x * y * 31) % 97
    edge = 255 if (x // 11 + y // 7) % 2 else 0
    return ((x * 4 + noise) % 256, (y * 5 + edge // 3) % 256, (edge + noise) // 2)


def picture():
    image = Image.new("RGB", (WIDTH, HEIGHT))
    image.putdata([pixel(x, y) for y in range(HEIGHT) for x in range(WIDTH)])
    return image


def write_pictures(rgb):
    alpha = rgb.getchannel("G")
    rgb.save(FOLDER / "rgb.png")
    rgba = rgb.copy()
    rgba.putalpha(alpha)
    rgba.save(FOLDER / "rgba.png")
    rgb.quantize(37).save(FOLDER / "palette.png", transparency=3)
    rgb.convert("L").save(FOLDER / "grey.png")
    rgb.convert("1").save(FOLDER / "bits.png")
    rgba.convert("LA").save(FOLDER / "grey-alpha.png")
    rgb.save(FOLDER / "rgb.jpg", quality=85)
    rgb.save(FOLDER / "progressive.jpg", quality=75, progressive=True)
    rgb.save(FOLDER / "full-colour.jpg", quality=95, subsampling=0)
    rgb.convert("L").save(FOLDER / "grey.jpg", quality=80)
    rgb.convert("CMYK").save(FOLDER / "cmyk.jpg", quality=90)


def resized(image, size, resample):
    if size is None:
        return image
    if isinstance(size, list):
        return image.resize((size[1], size[0]), resample)
    w, h = image.size
    wanted = (size, int(size * h / w)) if w <= h else (int(size * w / h), size)
    return image.resize(wanted, resample)


def cropped(image, crop):
    left, top = (int(round((extent - crop) / 2.0)) for extent in image.size)
    return image.crop((left, top, left + crop, top + crop))


def main():
    write_pictures(picture())
    header, data = {}, b""
    for path in sorted(FOLDER.glob("*.[jp][pn]g")):
        for name, case in CASES.items():
            if name not in ("smaller", "untouched") and path.name != "rgb.png":
                continue
            image = resized(Image.open(path).convert("RGB"), case["size"], case["resample"])
            pixels = cropped(image, case["crop"]).tobytes()
            header[f"{path.name}/{name}"] = {
                "dtype": "U8", "shape": [case["crop"], case["crop"], 3],
                "data_offsets": [len(data), len(data) + len(pixels)]}
            data += pixels
    text = json.dumps(header).encode()
    (FOLDER / "expected.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    main()
