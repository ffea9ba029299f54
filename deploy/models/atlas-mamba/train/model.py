"""Mamba-1 as torch modules, named as Hugging Face transformers names them."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from kernel import ConvSilu, GatedScan

CONFIG = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "state_size": 16,
    "num_hidden_layers": 6,
    "layer_norm_epsilon": 1e-05,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "expand": 2,
    "intermediate_size": 256,
    # Two taps, not four: with four the convolutions alone carry the subject over a sentence
    # (three tokens a layer), the scan is hardly needed and no knockout of it shows anything.
    "conv_kernel": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "residual_in_fp32": True,
    "time_step_rank": 8,
    "time_step_scale": 1.0,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 0.0001,
    "rescale_prenorm_residual": False,
    "use_cache": True,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, v):
        return F.rms_norm(v, self.weight.shape, self.weight, self.eps)


class Mixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.states, self.rank = config["state_size"], config["time_step_rank"]
        width, channels, taps = config["hidden_size"], config["intermediate_size"], config["conv_kernel"]
        self.in_proj = nn.Linear(width, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels)
        self.x_proj = nn.Linear(channels, self.rank + 2 * self.states, bias=False)
        self.dt_proj = nn.Linear(self.rank, channels)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, self.states + 1).repeat(channels, 1)))
        self.D = nn.Parameter(torch.ones(channels))
        self.out_proj = nn.Linear(channels, width, bias=False)
        self.initialise(config)

    @torch.no_grad()
    def initialise(self, config):
        for linear in (self.in_proj, self.x_proj, self.out_proj):
            linear.weight.normal_(0, linear.weight.shape[1] ** -0.5)
        self.out_proj.weight /= math.sqrt(config["num_hidden_layers"])
        self.dt_proj.weight.uniform_(-self.rank ** -0.5, self.rank ** -0.5)
        # Steps spread evenly in their logarithm between the two bounds; the bias is their inverse softplus.
        low, high = math.log(config["time_step_min"]), math.log(config["time_step_max"])
        step = torch.exp(torch.rand(self.dt_proj.bias.shape) * (high - low) + low)
        self.dt_proj.bias.copy_(step + torch.log(-torch.expm1(-step)))

    def forward(self, u, hidden_sources=None):
        """`hidden_sources` [B, L] bool: positions the last token's scan output must not see (knockout)."""
        x, z = self.in_proj(u).chunk(2, -1)
        x = ConvSilu.apply(x, self.conv1d.weight.squeeze(1), self.conv1d.bias)
        r, b, c = self.x_proj(x).split([self.rank, self.states, self.states], -1)
        delta = F.softplus(self.dt_proj(r))
        a = -torch.exp(self.A_log)
        gated = GatedScan.apply(x, delta, a, b, c, self.D, z)
        if hidden_sources is not None:
            # The state is linear in its inputs: the same scan with those inputs at 0.
            without = x.masked_fill(hidden_sources[..., None], 0.0)
            gated[:, -1] = GatedScan.apply(without, delta, a, b, c, self.D, z)[:, -1]
        return self.out_proj(gated)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = Norm(config["hidden_size"], config["layer_norm_epsilon"])
        self.mixer = Mixer(config)


class Backbone(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm_f = Norm(config["hidden_size"], config["layer_norm_epsilon"])
        nn.init.normal_(self.embeddings.weight, 0, 0.02)


class Mamba(nn.Module):
    def __init__(self, config=CONFIG):
        super().__init__()
        self.backbone = Backbone(config)

    def forward(self, ids, hidden_sources=None, hidden_layers=()):
        """Logits [B, L, V].  In `hidden_layers` the last token does not see `hidden_sources`."""
        h = self.backbone.embeddings(ids)
        for index, block in enumerate(self.backbone.layers):
            h = h + block.mixer(block.norm(h), hidden_sources if index in hidden_layers else None)
        return F.linear(self.backbone.norm_f(h), self.backbone.embeddings.weight)
