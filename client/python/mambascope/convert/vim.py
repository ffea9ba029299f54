"""Vision Mamba (bidirectional, "bimamba v2") as its training script saves it.

The tensors keep their names. Sizes are read off the tensors; what tensors do not tell (the size of
the image, the class token's place, whether the directions' sum is halved) comes from the caller,
else from the training arguments in the file, else is as in the published models. Patches may overlap (stride 8 of 16), so that the same
pos_embed fits images of different sizes: a size that is neither told nor the published one is asked.
"""
import math

from .checkpoint import Converted, Refused, Report, check_tensors, count_layers, shape_of

DIRECTIONS = ("", "_b")
PUBLISHED_SIZE = 224  # pixels a side, of every published model


def state_dict_of(loaded):
    """The weights in what torch.load gave: under "model", or themselves."""
    weights = loaded.get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(weights, dict) or "patch_embed.proj.weight" not in {
            name.removeprefix("module.") for name in weights}:
        raise Refused("no Vision Mamba: patch_embed.proj.weight is neither in the file nor under "
                      "its \"model\"")
    return {name.removeprefix("module."): tensor for name, tensor in weights.items()}


def refuse_other_kinds(tensors):
    first = "layers.0."
    reasons = {
        "cls_token_head": "two class tokens are not served",
        "rope.freqs_cos": "rotary positions are not served",
        first + "norm.bias": "models with LayerNorm are not served",
        first + "mixer.gamma": "layer scale (init_layer_scale) is not served",
        first + "mixer.A_s_log": "this kind of scan is not served",
    }
    for name, reason in reasons.items():
        if name in tensors:
            raise Refused(f"tensor {name}: {reason}")
    for name, what in (("cls_token", "models without a class token"),
                       ("pos_embed", "models without position embeddings"),
                       ("head.weight", "models without a classifier"),
                       (first + "mixer.A_b_log", "models other than bimamba v2 (no second scan)")):
        if name not in tensors:
            raise Refused(f"tensor {name} is missing: {what} are not served")


def image_geometry(patch, patches, image_size, stride):
    """(image size, stride); either may be given. Patches overlap where stride < patch."""
    side = math.isqrt(patches)
    if side * side != patches:
        raise Refused(f"pos_embed has {patches} patches, which is no square: only square images are "
                      "served")
    if stride is None and image_size is not None and side > 1:
        stride = (image_size - patch) // (side - 1)
    if stride is None and image_size is None and (side - 1) * patch + patch != PUBLISHED_SIZE:
        raise Refused(f"pos_embed has {side} x {side} patches of {patch} pixels, which with nothing "
                      f"between them are no image of {PUBLISHED_SIZE} as published: give --img-size")
    stride = stride or patch
    size = image_size or (side - 1) * stride + patch
    if (size - patch) // stride + 1 != side:
        raise Refused(f"an image of {size} with patches of {patch} every {stride} has "
                      f"{(size - patch) // stride + 1} a side, pos_embed has {side}; give --img-size "
                      "and --stride")
    return size, stride


def expected_tensors(config):
    width, inner = config["embed_dim"], config["expand"] * config["embed_dim"]
    states, rank, patch = config["d_state"], config["dt_rank"], config["patch_size"]
    patches = ((config["img_size"] - patch) // config["stride"] + 1) ** 2
    mixer = {"in_proj.weight": (2 * inner, width), "out_proj.weight": (width, inner)}
    for way in DIRECTIONS:
        mixer |= {f"conv1d{way}.weight": (inner, 1, config["d_conv"]), f"conv1d{way}.bias": (inner,),
                  f"x_proj{way}.weight": (rank + 2 * states, inner),
                  f"dt_proj{way}.weight": (inner, rank), f"dt_proj{way}.bias": (inner,),
                  f"A{way}_log": (inner, states), f"D{way}": (inner,)}
    expected = {"patch_embed.proj.weight": (width, config["channels"], patch, patch),
                "patch_embed.proj.bias": (width,), "cls_token": (1, 1, width),
                "pos_embed": (1, patches + 1, width), "norm_f.weight": (width,),
                "head.weight": (config["num_classes"], width),
                "head.bias": (config["num_classes"],)}
    for layer in range(config["depth"]):
        expected[f"layers.{layer}.norm.weight"] = (width,)
        expected |= {f"layers.{layer}.mixer.{name}": shape for name, shape in mixer.items()}
    return expected


def convert(loaded, image_size=None, stride=None, middle_class_token=None, divide_out=None):
    report, tensors = Report(), state_dict_of(loaded)
    refuse_other_kinds(tensors)
    arguments = vars(loaded["args"]) if hasattr(loaded.get("args"), "__dict__") else {}
    name = arguments.get("model", "")
    if image_size is None and arguments.get("input_size"):
        image_size = arguments["input_size"]
        report.notes.append(f"img_size {image_size}: input_size of the training arguments")
    if middle_class_token is None:
        middle_class_token = "midclstok" in name or "middle_cls_token" in name if name else True
        report.notes.append(f"use_middle_cls_token {middle_class_token}: as "
                            + (f"the name {name} says" if name else "in the published models"))
    if divide_out is None:
        divide_out = "div2" in name if name else True
        report.notes.append(f"if_divide_out {divide_out}: as "
                            + (f"the name {name} says" if name else "in the published models"))

    mixer = "layers.0.mixer."
    width, channels, patch, _ = shape_of(tensors, "patch_embed.proj.weight", 4)
    inner, rank = shape_of(tensors, mixer + "dt_proj.weight", 2)
    if inner % width != 0:
        raise Refused(f"inner width {inner} is not a multiple of embed_dim {width}")
    tokens = shape_of(tensors, "pos_embed", 3)[1]
    size, stride = image_geometry(patch, tokens - 1, image_size, stride)
    report.notes.append(f"img_size {size}, stride {stride}")
    config = {
        "model_type": "vim", "architectures": ["VisionMamba"],
        "img_size": size, "patch_size": patch, "stride": stride, "channels": channels,
        "embed_dim": width, "depth": count_layers(tensors, "layers."),
        "num_classes": shape_of(tensors, "head.weight", 2)[0],
        "d_state": shape_of(tensors, mixer + "A_log", 2)[1],
        "d_conv": shape_of(tensors, mixer + "conv1d.weight", 3)[2],
        "expand": inner // width, "dt_rank": rank, "norm_epsilon": 1e-5, "rms_norm": True,
        "fused_add_norm": True, "residual_in_fp32": True, "bimamba_type": "v2",
        "if_cls_token": True, "use_middle_cls_token": middle_class_token,
        "if_abs_pos_embed": True, "if_divide_out": divide_out, "final_pool_type": "mean",
        "torch_dtype": str(tensors["head.weight"].dtype).removeprefix("torch."),
    }
    check_tensors(tensors, expected_tensors(config))
    report.mapped = [(name, name) for name in tensors]
    if "model" in loaded:
        report.dropped = [(key, "of training") for key in loaded if key != "model"]
    return Converted(config, tensors, report)
