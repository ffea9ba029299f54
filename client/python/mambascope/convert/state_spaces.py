"""Mamba-1 and Mamba-2 as the original code saves them, to Hugging Face's names and keys."""
import math

from .checkpoint import Converted, Refused, Report, check_tensors, count_layers, shape_of

NORM_EPSILON = 1e-5  # fixed in the original code
# Keys of config.json that are read; any other might change the arithmetic and is refused.
CONFIG_KEYS = {"d_model", "n_layer", "vocab_size", "ssm_cfg", "rms_norm", "residual_in_fp32",
               "fused_add_norm", "pad_vocab_size_multiple", "tie_embeddings", "d_intermediate",
               "attn_layer_idx", "attn_cfg"}
# Keys of ssm_cfg without effect on the numbers of a trained model.
TRAINING_KEYS = {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "conv_init",
                 "A_init_range", "use_fast_path", "use_mem_eff_path", "sequence_parallel"}
SSM_KEYS = {"Mamba1": {"d_state", "d_conv", "expand", "dt_rank", "conv_bias", "bias"},
            "Mamba2": {"d_state", "d_conv", "expand", "headdim", "ngroups", "conv_bias", "bias",
                       "d_ssm", "D_has_hdim", "rmsnorm", "norm_before_gate", "dt_limit",
                       "chunk_size"}}
# Rows of the embedding that GPT-NeoX's tokenizer, the one of the published models, is padded to.
NEOX_VOCABULARIES = {50277, 50280, 50288, 50304}
EMBEDDING, HEAD = "backbone.embedding.weight", "lm_head.weight"


def is_original(config):
    return "d_model" in config and "n_layer" in config


def check_config(config):
    """The kind of layer, "Mamba1" or "Mamba2", of a model that is nothing else."""
    if config.get("attn_layer_idx"):
        raise Refused(f"config.json: attn_layer_idx {config['attn_layer_idx']}: layers of attention "
                      "are not served")
    if config.get("d_intermediate", 0) > 0:
        raise Refused(f"config.json: d_intermediate {config['d_intermediate']}: MLP layers are not "
                      "served")
    if not config.get("rms_norm", True):
        raise Refused("config.json: rms_norm false: models with LayerNorm are not served")
    unknown = sorted(set(config) - CONFIG_KEYS)
    if unknown:
        raise Refused(f"config.json: {', '.join(unknown)}: not known; take out what does not change "
                      "the model's arithmetic")
    ssm = config.get("ssm_cfg") or {}
    layer = ssm.get("layer", "Mamba1")
    if layer not in SSM_KEYS:
        raise Refused(f"config.json: ssm_cfg.layer {layer!r}: known are Mamba1 and Mamba2")
    unknown = sorted(set(ssm) - SSM_KEYS[layer] - TRAINING_KEYS - {"layer"})
    if unknown:
        raise Refused(f"config.json: ssm_cfg.{', ssm_cfg.'.join(unknown)}: not known of {layer}")
    return layer


def agree(what, stated, actual):
    if stated is not None and stated != actual:
        raise Refused(f"config.json says {what} = {stated}, the tensors have {actual}")


def whole(what, numerator, denominator):
    if numerator % denominator != 0:
        raise Refused(f"{what}: {numerator} is not a multiple of {denominator}")
    return numerator // denominator


def common_sizes(config, ssm, tensors):
    """What both kinds read off their tensors: the Hugging Face keys they share."""
    vocabulary, width = shape_of(tensors, EMBEDDING, 2)
    layers = count_layers(tensors, "backbone.layers.")
    mixer = "backbone.layers.0.mixer."
    inner = shape_of(tensors, mixer + "out_proj.weight", 2)[1]
    taps = shape_of(tensors, mixer + "conv1d.weight", 3)[2]
    if "backbone.layers.0.norm.bias" in tensors:
        raise Refused("tensor backbone.layers.0.norm.bias: models with LayerNorm are not served")
    agree("d_model", config["d_model"], width)
    agree("n_layer", config["n_layer"], layers)
    agree("ssm_cfg.d_conv", ssm.get("d_conv"), taps)
    stated, multiple = config.get("vocab_size", vocabulary), config.get("pad_vocab_size_multiple", 1)
    agree("vocab_size, padded to a multiple of pad_vocab_size_multiple",
          -(-stated // multiple) * multiple, vocabulary)
    expand = whole("inner width over d_model", inner, width)
    agree("ssm_cfg.expand", ssm.get("expand"), expand)
    return {
        "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers,
        "intermediate_size": inner, "expand": expand, "conv_kernel": taps,
        "use_bias": mixer + "in_proj.bias" in tensors,
        "use_conv_bias": mixer + "conv1d.bias" in tensors,
        "hidden_act": "silu", "layer_norm_epsilon": NORM_EPSILON,
        "residual_in_fp32": bool(config.get("residual_in_fp32", True)),
    }


def mamba1_config(config, ssm, tensors):
    hf = common_sizes(config, ssm, tensors)
    mixer = "backbone.layers.0.mixer."
    states = shape_of(tensors, mixer + "A_log", 2)[1]
    rank = shape_of(tensors, mixer + "dt_proj.weight", 2)[1]
    agree("ssm_cfg.d_state", ssm.get("d_state"), states)
    if ssm.get("dt_rank", "auto") != "auto":
        agree("ssm_cfg.dt_rank", ssm["dt_rank"], rank)
    return {"model_type": "mamba", "architectures": ["MambaForCausalLM"], **hf,
            "state_size": states, "time_step_rank": rank}


def mamba2_config(config, ssm, tensors):
    hf = common_sizes(config, ssm, tensors)
    mixer, inner = "backbone.layers.0.mixer.", hf["intermediate_size"]
    for key, served in (("D_has_hdim", False), ("rmsnorm", True), ("norm_before_gate", False)):
        if ssm.get(key, served) != served:
            raise Refused(f"config.json: ssm_cfg.{key} {ssm[key]}: only {served} is served")
    if (ssm.get("d_ssm") or inner) != inner:
        raise Refused(f"config.json: ssm_cfg.d_ssm {ssm['d_ssm']} of {inner}: a gated MLP beside the "
                      "scan is not served")
    heads = shape_of(tensors, mixer + "A_log", 1)[0]
    head_dim = whole("inner width over heads", inner, heads)
    agree("ssm_cfg.headdim", ssm.get("headdim", 64), head_dim)
    states, channels = ssm.get("d_state", 128), shape_of(tensors, mixer + "conv1d.weight", 3)[0]
    groups = ssm.get("ngroups", 1)
    agree("ssm_cfg.d_state x ngroups", states * groups,
          whole("convolution channels beside the inner ones", channels - inner, 2))
    return {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], **hf,
            "state_size": states, "head_dim": head_dim, "num_heads": heads, "n_groups": groups,
            "chunk_size": ssm.get("chunk_size", 256), **time_step_limit(ssm)}


def time_step_limit(ssm):
    """Nothing where there is no limit: infinity is no JSON number."""
    low, high = (float(value) for value in ssm.get("dt_limit", (0.0, "inf")))
    if (low, high) == (0.0, math.inf):
        return {}
    return {"time_step_limit": [low, {"__float__": "Infinity"} if high == math.inf else high]}


def expected_tensors(hf):
    """Name -> shape, under Hugging Face's names."""
    width, inner, taps = hf["hidden_size"], hf["intermediate_size"], hf["conv_kernel"]
    states, rank = hf["state_size"], hf.get("time_step_rank")
    is_first = hf["model_type"] == "mamba"
    channels = inner if is_first else inner + 2 * hf["n_groups"] * states
    projected = 2 * inner if is_first else inner + channels + hf["num_heads"]
    mixer = {"in_proj.weight": (projected, width), "out_proj.weight": (width, inner),
             "conv1d.weight": (channels, 1, taps)}
    if is_first:
        mixer |= {"x_proj.weight": (rank + 2 * states, inner), "dt_proj.weight": (inner, rank),
                  "dt_proj.bias": (inner,), "A_log": (inner, states), "D": (inner,)}
    else:
        heads = (hf["num_heads"],)
        mixer |= {"dt_bias": heads, "A_log": heads, "D": heads, "norm.weight": (inner,)}
    if hf["use_bias"]:
        mixer |= {"in_proj.bias": (projected,), "out_proj.bias": (width,)}
    if hf["use_conv_bias"]:
        mixer["conv1d.bias"] = (channels,)

    expected = {"backbone.embeddings.weight": (hf["vocab_size"], width),
                "backbone.norm_f.weight": (width,)}
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"backbone.layers.{layer}."
        expected[prefix + "norm.weight"] = (width,)
        expected |= {f"{prefix}mixer.{name}": shape for name, shape in mixer.items()}
    if not hf["tie_word_embeddings"]:
        expected[HEAD] = (hf["vocab_size"], width)
    return expected


def end_of_text(vocabulary, tokenizer, report):
    """The id after which generation ends."""
    if tokenizer is not None:
        for token in tokenizer.get("added_tokens", []):
            if token.get("content") in ("<|endoftext|>", "</s>", "<|im_end|>"):
                report.notes.append(f"eos_token_id {token['id']}: {token['content']} of tokenizer.json")
                return token["id"]
    elif vocabulary in NEOX_VOCABULARIES:
        report.notes.append("eos_token_id 0: <|endoftext|> of GPT-NeoX's tokenizer, which has this "
                            "vocabulary")
        return 0
    report.notes.append("eos_token_id is not set: no token is known to end a text")
    return None


def convert(config, tensors, tokenizer=None):
    """config.json and state dict of the original code; `tokenizer`: tokenizer.json, if any."""
    layer, ssm, report = check_config(config), config.get("ssm_cfg") or {}, Report()
    hf = (mamba1_config if layer == "Mamba1" else mamba2_config)(config, ssm, tensors)
    hf["tie_word_embeddings"] = bool(config.get("tie_embeddings", True))

    tensors = dict(tensors)
    if hf["tie_word_embeddings"] and HEAD in tensors:
        if not tensors[HEAD].equal(tensors[EMBEDDING]):
            raise Refused(f"{HEAD} differs from {EMBEDDING}, although config.json ties them")
        del tensors[HEAD]
        report.dropped.append((HEAD, f"equals {EMBEDDING}, to which config.json ties it"))
    renamed = {}
    for name, tensor in tensors.items():
        new = "backbone.embeddings.weight" if name == EMBEDDING else name
        report.mapped.append((name, new))
        renamed[new] = tensor
    check_tensors(renamed, expected_tensors(hf))

    for key in sorted(set(ssm) & TRAINING_KEYS):
        report.dropped.append((f"ssm_cfg.{key}", "of training or of a kernel; the numbers are the same"))
    for key in sorted({"fused_add_norm", "attn_cfg"} & set(config)):
        report.dropped.append((key, "of a kernel or of attention layers, of which there are none"))
    hf["eos_token_id"] = hf["bos_token_id"] = hf["pad_token_id"] = end_of_text(
        hf["vocab_size"], tokenizer, report)
    hf["torch_dtype"] = str(renamed["backbone.embeddings.weight"].dtype).removeprefix("torch.")
    return Converted(hf, renamed, report)
