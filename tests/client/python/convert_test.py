"""python -m mambascope.convert on synthetic checkpoints. Needs torch and safetensors; what compares
logits also needs transformers, and MAMBASCOPE_CLI may name the command line, which then must predict
the same. tests/end_to_end/convert.sh runs it, or:

    PYTHONPATH=client/python python3 -m unittest tests/client/python/convert_test.py
"""
import argparse
import contextlib
import io
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch
from mambascope.convert.__main__ import main
from safetensors.torch import load_file

try:
    import transformers
except ImportError:
    transformers = None


class Folder(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.source, self.out = self.folder / "source", self.folder / "out"

    def write_original(self, config, tensors):
        self.source.mkdir(exist_ok=True)
        (self.source / "config.json").write_text(json.dumps(config))
        torch.save(tensors, self.source / "pytorch_model.bin")

    def convert(self, *arguments, source=None):
        """What was printed of a conversion that succeeds."""
        code, out, err = self.run_main(*arguments, source=source)
        self.assertEqual(code, 0, err)
        return out

    def refusal(self, *arguments, source=None):
        code, _, err = self.run_main(*arguments, source=source)
        self.assertEqual(code, 1)
        self.assertFalse(self.out.exists(), "a refused conversion leaves nothing")
        self.assertEqual([p.name for p in self.folder.glob("*.part")], [])
        return err

    def run_main(self, *arguments, source=None):
        with contextlib.redirect_stdout(io.StringIO()) as out, \
                contextlib.redirect_stderr(io.StringIO()) as err:
            code = main([str(source or self.source), str(self.out), *map(str, arguments)])
        return code, out.getvalue(), err.getvalue()

    def config(self):
        return json.loads((self.out / "config.json").read_text())


# ------------------------------------------------------------------ original checkpoints

def randomised(model):
    """Every parameter random, at scales that keep activations of order one."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-1, 2)
            elif "norm" in name or name.endswith(".D"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() >= 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            else:
                parameter.uniform_(-1, 1)
    return model.eval()


def original_names(model):
    """The state dict of a transformers model as the original code would have saved it."""
    return {name.replace("backbone.embeddings.", "backbone.embedding."): tensor.detach().clone()
            for name, tensor in model.state_dict().items()}


UNSERVED = ("mamba2",)  # may be refused by the server by name
MAMBA1 = dict(d_model=24, n_layer=2, vocab_size=61, ssm_cfg={}, rms_norm=True,
              residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=8)
MAMBA2 = dict(d_model=16, d_intermediate=0, n_layer=2, vocab_size=61,
              ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 4, "ngroups": 2},
              attn_layer_idx=[], attn_cfg={}, rms_norm=True, residual_in_fp32=True,
              fused_add_norm=True, pad_vocab_size_multiple=16, tie_embeddings=True)


@unittest.skipIf(transformers is None, "transformers is not installed")
class AgainstTransformers(Folder):
    def assert_same_logits(self, model):
        converted = transformers.AutoModelForCausalLM.from_pretrained(
            self.out, dtype=torch.float32).eval()
        self.assertIs(type(converted), type(model))
        tokens = torch.tensor([[1, 5, 60, 0, 17, 33, 2]])
        with torch.no_grad():
            self.assertTrue(torch.equal(converted(tokens).logits, model(tokens).logits))
        self.assertEqual({name for name, _ in converted.named_parameters()},
                         {name for name, _ in model.named_parameters()})
        self.assert_served(model)

    def assert_served(self, model):
        """The command line, which embeds the server, must predict the same."""
        command = os.environ.get("MAMBASCOPE_CLI")
        if not command:
            return
        tensors = self.folder / "logits.safetensors"
        run = subprocess.run([command, "predict", "--model", str(self.out), "--tokens", "1,5,60,0",
                              "--logits", "--output", str(tensors), "--json"],
                             capture_output=True, text=True, timeout=120)
        if model.config.model_type in UNSERVED and "is not supported" in run.stdout + run.stderr:
            self.skipTest(f"{model.config.model_type} is converted rightly, but not served yet")
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        with torch.no_grad():
            expected = model(torch.tensor([[1, 5, 60, 0]])).logits[0, -1]
        # fp32 sums in another order
        torch.testing.assert_close(load_file(tensors)["logits"].flatten(), expected, rtol=1e-4,
                                   atol=1e-4)

    def mamba1(self, **options):
        return randomised(transformers.MambaForCausalLM(transformers.MambaConfig(
            vocab_size=64, hidden_size=24, num_hidden_layers=2, time_step_rank=2, state_size=16,
            **options)))

    def mamba2(self, **options):
        return randomised(transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{
            **dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=8, head_dim=4,
                   num_heads=8, n_groups=2, tie_word_embeddings=True, chunk_size=256), **options})))

    def test_mamba1(self):
        model = self.mamba1()
        self.write_original(MAMBA1, original_names(model))
        report = self.convert()
        self.assert_same_logits(model)
        self.assertIn("backbone.embedding.weight -> backbone.embeddings.weight", report)
        self.assertIn("dropped  lm_head.weight: equals backbone.embedding.weight", report)
        self.assertNotIn("lm_head.weight", load_file(self.out / "model.safetensors"))
        self.assertEqual(self.config()["model_type"], "mamba")
        self.assertEqual(self.config()["vocab_size"], 64)
        self.assertIs(self.config()["eos_token_id"], None)

    def test_mamba1_of_other_sizes(self):
        model = self.mamba1(use_bias=True, use_conv_bias=False, conv_kernel=3, expand=3)
        self.write_original({**MAMBA1, "ssm_cfg": {"d_conv": 3, "expand": 3, "bias": True,
                                                   "conv_bias": False, "dt_min": 0.01}},
                            original_names(model))
        self.assertIn("ssm_cfg.dt_min", self.convert())
        self.assert_same_logits(model)

    def test_mamba2(self):
        model = self.mamba2()
        self.write_original(MAMBA2, original_names(model))
        self.convert()
        self.assert_same_logits(model)
        config = self.config()
        self.assertEqual((config["num_heads"], config["head_dim"], config["n_groups"],
                          config["state_size"]), (8, 4, 2, 8))
        self.assertNotIn("time_step_limit", config)

    def test_mamba2_with_a_limit_and_a_head_of_its_own(self):
        model = self.mamba2(time_step_limit=(0.05, 0.9), tie_word_embeddings=False, n_groups=1)
        ssm = {**MAMBA2["ssm_cfg"], "dt_limit": [0.05, 0.9], "ngroups": 1}
        self.write_original({**MAMBA2, "ssm_cfg": ssm, "tie_embeddings": False},
                            original_names(model))
        self.convert()
        self.assert_same_logits(model)
        self.assertEqual(self.config()["time_step_limit"], [0.05, 0.9])


def mamba1_tensors():
    """As MAMBA1 says, without transformers."""
    torch.manual_seed(2)
    tensors = {"backbone.embedding.weight": torch.randn(64, 24),
               "backbone.norm_f.weight": torch.rand(24)}
    for layer in range(2):
        prefix = f"backbone.layers.{layer}."
        shapes = {"norm.weight": (24,), "mixer.in_proj.weight": (96, 24),
                  "mixer.conv1d.weight": (48, 1, 4), "mixer.conv1d.bias": (48,),
                  "mixer.x_proj.weight": (34, 48), "mixer.dt_proj.weight": (48, 2),
                  "mixer.dt_proj.bias": (48,), "mixer.A_log": (48, 16), "mixer.D": (48,),
                  "mixer.out_proj.weight": (24, 48)}
        tensors |= {prefix + name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]  # one memory, as when tied
    return tensors


class Original(Folder):
    def test_tensors_keep_their_bits(self):
        tensors = {name: tensor.half() for name, tensor in mamba1_tensors().items()}
        self.write_original(MAMBA1, tensors)
        self.convert()
        stored = load_file(self.out / "model.safetensors")
        self.assertEqual(len(stored), len(tensors) - 1)
        self.assertTrue(torch.equal(stored["backbone.embeddings.weight"],
                                    tensors["backbone.embedding.weight"]))
        self.assertEqual(self.config()["torch_dtype"], "float16")

    def test_a_tokenizer_comes_along(self):
        self.write_original(MAMBA1, mamba1_tensors())
        tokenizer = {"added_tokens": [{"id": 7, "content": "<|endoftext|>"}]}
        (self.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.convert("--tokenizer", self.folder)
        self.assertEqual(json.loads((self.out / "tokenizer.json").read_text()), tokenizer)
        self.assertEqual(self.config()["eos_token_id"], 7)

    def test_what_is_not_known_is_refused(self):
        cases = [
            ({"attn_layer_idx": [1]}, "attn_layer_idx [1]: layers of attention are not served"),
            ({"d_intermediate": 48}, "d_intermediate 48: MLP layers are not served"),
            ({"rms_norm": False}, "rms_norm false: models with LayerNorm are not served"),
            ({"bidirectional": True}, "bidirectional: not known"),
            ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer 'Mamba3'"),
            ({"ssm_cfg": {"wobble": 1}}, "ssm_cfg.wobble: not known of Mamba1"),
            ({"ssm_cfg": {"d_state": 8}}, "ssm_cfg.d_state = 8, the tensors have 16"),
            ({"d_model": 32}, "d_model = 32, the tensors have 24"),
            ({"vocab_size": 70}, "= 72, the tensors have 64"),
            ({"ssm_cfg": {"layer": "Mamba2"}}, "mixer.A_log has shape [48, 16]"),
        ]
        for changes, message in cases:
            with self.subTest(changes):
                self.write_original({**MAMBA1, **changes}, mamba1_tensors())
                self.assertIn(message, self.refusal())

    def test_tensors_that_do_not_fit_are_refused(self):
        def without(name):
            return {key: value for key, value in mamba1_tensors().items() if key != name}
        x_proj, A_log = "backbone.layers.1.mixer.x_proj.weight", "backbone.layers.1.mixer.A_log"
        cases = [
            (without(x_proj), f"{x_proj} is missing"),
            (without("backbone.embedding.weight"), "tensor backbone.embedding.weight is missing"),
            ({**mamba1_tensors(), "extra": torch.zeros(1)}, "extra is not known"),
            ({**mamba1_tensors(), A_log: torch.zeros(48, 15)},
             f"{A_log} has shape [48, 15], expected [48, 16]"),
            ({**mamba1_tensors(), A_log: torch.zeros(48, 16, dtype=torch.int8)},
             f"{A_log} has dtype torch.int8"),
            ({**mamba1_tensors(), "lm_head.weight": torch.zeros(64, 24)}, "lm_head.weight differs"),
            ({**mamba1_tensors(), "backbone.layers.0.norm.bias": torch.zeros(24)}, "LayerNorm"),
            ({**mamba1_tensors(), "backbone.layers.3.norm.weight": torch.zeros(24)},
             "do not make a whole stack of layers"),
        ]
        for tensors, message in cases:
            with self.subTest(message):
                self.write_original(MAMBA1, tensors)
                self.assertIn(message, self.refusal())

    def test_code_in_a_pickle_is_not_run(self):
        class Evil:
            def __reduce__(self):
                return (pathlib.Path.touch, (pathlib.Path(marker),))
        marker = str(self.folder / "was-run")
        self.write_original(MAMBA1, {"backbone.embedding.weight": Evil()})
        self.assertIn("cannot be read as tensors", self.refusal())
        self.assertFalse(pathlib.Path(marker).exists())

    def test_sources_that_are_none(self):
        self.assertIn("there is no such file or folder", self.refusal())
        self.source.mkdir()
        self.assertIn("has no config.json", self.refusal())
        (self.source / "config.json").write_text("[")
        self.assertIn("config.json: ", self.refusal())
        (self.source / "config.json").write_text(json.dumps(MAMBA1))
        self.assertIn("has no pytorch_model.bin", self.refusal())
        (self.source / "pytorch_model.bin").write_bytes(b"not a pickle")
        self.assertIn("cannot be read as tensors", self.refusal())
        (self.source / "config.json").write_text('{"model_type": "falcon_mamba"}')
        (self.source / "model.safetensors").write_bytes(b"")
        self.assertIn("there is nothing to convert", self.refusal())

    def test_a_folder_with_something_in_it_is_left_alone(self):
        self.write_original(MAMBA1, mamba1_tensors())
        self.out.mkdir()
        self.convert()  # an empty one is as good as none
        code, _, err = self.run_main()
        self.assertEqual(code, 1)
        self.assertIn("not an empty folder", err)


# ------------------------------------------------------------------ Vision Mamba

def vim_tensors(patches=16, patch=4):
    torch.manual_seed(3)
    shapes = {"patch_embed.proj.weight": (24, 3, patch, patch), "patch_embed.proj.bias": (24,),
              "cls_token": (1, 1, 24), "pos_embed": (1, patches + 1, 24), "norm_f.weight": (24,),
              "head.weight": (10, 24), "head.bias": (10,)}
    for layer in range(2):
        mixer = f"layers.{layer}.mixer."
        shapes |= {f"layers.{layer}.norm.weight": (24,), mixer + "in_proj.weight": (96, 24),
                   mixer + "out_proj.weight": (24, 48)}
        for way in ("", "_b"):
            shapes |= {f"{mixer}conv1d{way}.weight": (48, 1, 4), f"{mixer}conv1d{way}.bias": (48,),
                       f"{mixer}x_proj{way}.weight": (2 + 16, 48),
                       f"{mixer}dt_proj{way}.weight": (48, 2), f"{mixer}dt_proj{way}.bias": (48,),
                       f"{mixer}A{way}_log": (48, 8), f"{mixer}D{way}": (48,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


class VisionMamba(Folder):
    def save(self, loaded):
        path = self.folder / "vim.pth"
        torch.save(loaded, path)
        return path

    def test_sizes_are_read_off_the_tensors(self):
        tensors = vim_tensors()
        report = self.convert("--img-size", 16,
                              source=self.save({"model": tensors, "epoch": 3, "optimizer": {}}))
        stored = load_file(self.out / "model.safetensors")
        self.assertEqual(set(stored), set(tensors))
        self.assertTrue(all(torch.equal(stored[name], tensors[name]) for name in tensors))
        config = self.config()
        for key, value in dict(model_type="vim", img_size=16, patch_size=4, stride=4, channels=3,
                               embed_dim=24, depth=2, num_classes=10, d_state=8, d_conv=4, expand=2,
                               dt_rank=2, norm_epsilon=1e-5, rms_norm=True, bimamba_type="v2",
                               if_cls_token=True, use_middle_cls_token=True, if_abs_pos_embed=True,
                               if_divide_out=True).items():
            self.assertEqual(config[key], value, key)
        self.assertIn("dropped  optimizer: of training", report)
        self.assertIn("use_middle_cls_token True: as in the published models", report)

    def test_the_model_of_the_goldens_comes_out_as_it_is_served(self):
        golden = pathlib.Path(__file__).parents[2] / "golden" / "vim-tiny"
        tensors = load_file(golden / "model.safetensors")
        self.convert("--img-size", 16, source=self.save({"model": tensors}))
        expected, config = json.loads((golden / "config.json").read_text()), self.config()
        self.assertEqual({key: config[key] for key in expected}, expected)
        stored = load_file(self.out / "model.safetensors")
        self.assertEqual(set(stored), set(tensors))
        self.assertTrue(all(torch.equal(stored[name], tensors[name]) for name in tensors))

    def test_training_arguments_say_what_tensors_do_not(self):
        arguments = argparse.Namespace(
            model="vim_tiny_patch16_stride8_224_bimambav2_final_pool_mean_abs_pos_embed_with_"
                  "midclstok_div2", input_size=16)
        tensors = {"module." + name: t for name, t in vim_tensors(patches=49).items()}
        self.convert(source=self.save({"model": tensors, "args": arguments}))
        config = self.config()
        self.assertEqual((config["img_size"], config["stride"]), (16, 2))
        self.assertTrue(config["use_middle_cls_token"] and config["if_divide_out"])

    def test_the_published_size_needs_no_option(self):
        self.convert(source=self.save(vim_tensors(patches=56 * 56)))
        self.assertEqual((self.config()["img_size"], self.config()["stride"]), (224, 4))

    def test_options_win(self):
        path = self.save(vim_tensors(patches=9))
        self.convert("--img-size", 14, "--stride", 5, "--class-token", "first", "--no-divide-out",
                     source=path)
        config = self.config()
        self.assertEqual((config["img_size"], config["stride"]), (14, 5))
        self.assertFalse(config["use_middle_cls_token"] or config["if_divide_out"])

    def test_what_is_not_known_is_refused(self):
        def without(name):
            return {key: value for key, value in vim_tensors().items() if key != name}
        cases = [
            ({"weights": vim_tensors()}, "no Vision Mamba"),
            ([1, 2], "no Vision Mamba"),
            (without("cls_token"), "models without a class token are not served"),
            (without("layers.0.mixer.A_b_log"), "bimamba v2"),
            (without("layers.1.mixer.A_b_log"), "layers.1.mixer.A_b_log is missing"),
            ({**vim_tensors(), "layers.0.norm.bias": torch.zeros(24)}, "LayerNorm"),
            ({**vim_tensors(), "cls_token_head": torch.zeros(1, 1, 24)}, "two class tokens"),
            ({**vim_tensors(), "dist_token": torch.zeros(1, 1, 24)}, "dist_token is not known"),
            (vim_tensors(patches=15), "pos_embed has 15 patches, which is no square"),
        ]
        for loaded, message in cases:
            with self.subTest(message):
                self.assertIn(message, self.refusal("--img-size", 16, source=self.save(loaded)))
        self.assertIn("are no image of 224 as published: give --img-size",
                      self.refusal(source=self.save(vim_tensors())))
        self.assertIn("give --img-size and --stride",
                      self.refusal("--img-size", 40, "--stride", 4,
                                   source=self.save(vim_tensors())))


if __name__ == "__main__":
    unittest.main()
