"""Writes smollm2_token_ids.json: varied texts with llama.cpp's token ids for the built-in model.

    pip install llama-cpp-python && python tests/data/make_tokenizer_fixture.py MODEL.gguf

llama.cpp is the oracle: the GGUF file names its pre-tokenizer, and llama.cpp defines what the name means.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llama_cpp import Llama

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tokenizer_texts import varied_texts


def main() -> None:
    model = Llama(model_path=sys.argv[1], vocab_only=True, verbose=False)
    lines = []
    for text in varied_texts(1000):
        ids = model.tokenize(text.encode(), add_bos=False, special=True)
        lines.append(json.dumps([text, ids], ensure_ascii=False, separators=(",", ":")))
    target = Path(__file__).with_name("smollm2_token_ids.json")
    target.write_text("[" + ",\n".join(lines) + "]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
