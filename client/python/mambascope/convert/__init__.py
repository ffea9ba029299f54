"""Turns published checkpoints into the layout that the server reads.

    python -m mambascope.convert SOURCE OUT

SOURCE is a folder of the original Mamba code (config.json with d_model, pytorch_model.bin) or a
.pth file of Vision Mamba. OUT gets config.json and model.safetensors, with tokenizer.json where
there is one. What is not known is refused: a model that is served is the model that was published.

    state_spaces.py   Mamba-1 and Mamba-2 of the original code, to Hugging Face's names
    vim.py            Vision Mamba's checkpoints
    checkpoint.py     reading pickles safely, shapes, the report, writing the folder
"""
