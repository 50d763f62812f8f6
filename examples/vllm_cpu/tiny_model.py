"""A tiny Llama with random weights and a byte-level tokenizer, made offline.

python -m examples.vllm_cpu.tiny_model FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

BLOCK_TOKENS = 32
"""Tokens in a KV block, as `engine.make_llm` configures it."""

LAYERS, KV_HEADS, HEAD_DIM, BYTES_PER_NUMBER = 2, 1, 64, 2

BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * BYTES_PER_NUMBER * BLOCK_TOKENS
"""Bytes of a KV block in one worker: keys and values of every layer. With one KV head, every rank holds a copy."""

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
FIRST_TEXT_TOKEN = len(SPECIAL_TOKENS)
TEXT_TOKENS = 256
"""There is one token for each byte, from `FIRST_TEXT_TOKEN` on."""


def build(path: str | Path) -> Path:
    """Write the model and its tokenizer into a folder. The same call gives the same weights.

    Args:
        path: The folder. It is created; a model that is already there is left as it is.

    Returns:
        The folder.
    """
    folder = Path(path)
    if (folder / "model.safetensors").exists():
        return folder

    import torch
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)

    config = LlamaConfig(
        vocab_size=512,  # more than the tokenizer has: a multiple of 64 splits evenly over ranks
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        bos_token_id=SPECIAL_TOKENS.index("<s>"),
        eos_token_id=SPECIAL_TOKENS.index("</s>"),
        # Large and untied: with the usual weights a random model repeats its last token, whatever its cache holds.
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Make a tiny Llama with random weights, offline.")
    parser.add_argument("folder", help="where to; a model that is already there is left as it is")
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
