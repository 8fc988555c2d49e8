"""Varied texts for tokenizer tests: the same ones for the same seed and count."""

from __future__ import annotations

import random


def _split(text: str) -> list[str]:
    return text.split()


_WORDS = _split(
    "the quick brown fox isn't they're WE'LL don’t naïve café Ångström straße İstanbul ﬁnance x² ½ №5 ① Ⅷ "
    "привет мир Ελλάδα שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก 你好 世界 日本語のテキスト "
    "カタカナ 한국어 문장 tiếng Việt e\u0301 a\u0308 Z\u0351\u036b\u0343 ǆ ʻokina ’tis rock'n'roll co-op "
    "snake_case camelCase HTTPServer supercalifragilisticexpialidocious zzzzzzzzqqqq AAAAAAAA 0xDEADBEEF "
    "user@example.com https://a.b/c?d=e&f#g"
)
_CODE = (
    "def f(x: int) -> int:\n    return x ** 2\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n\t}\n",
    "SELECT * FROM t WHERE a >= 1.5e-3 AND b != 'x''y';",
    '<div class="a b">&nbsp;text</div>\r\n<!-- c -->\r\n',
    'if __name__ == "__main__":\n        main()\n\n\n',
    "#include <vector>\n#define MAX(a,b) ((a)>(b)?(a):(b))\n",
    '{"key": [1, 2.50, null, true], "ключ": "значение"}',
    "let y = x?.z ?? `a${b}`; // 注释\n",
    "$ git commit -m 'fix: 42' && echo $?\n",
    "\\frac{\\partial u}{\\partial t} = \\alpha \\nabla^2 u",
)
_EMOJI = _split("😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ❤️ ☃ ✅ 🧑🏿‍💻 ♟︎ 1️⃣ 🫠")
_PUNCTUATION = _split(
    "... !!! ?! -- — – ( ) [] {} <> \" ' “ ” ‘ ’ « » 、 。 ！ ？ · • § ¶ † % ‰ € £ ¥ ₿ ± × ÷ ≈ ∞ → ∑ √ ∂"
)
_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\t\t ",
    "\u00a0",
    "\u3000",
    "\u2003",
    "    ",
    "\u200b",
)
_SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\n",
    "<repo_name>",
    "<|not_special|>",
)
# Control characters whose bytes the built-in model's vocabulary lacks are left out: they vanish.
_CONTROL = "\x00\x01\x02\x03\x05\x07\x08\x0b\x0c\x1b\x1f\x7f\x80\x85\x9f"


def varied_texts(count: int, seed: int = 0) -> list[str]:
    """Words of many scripts, code, digits, runs of blanks, emoji, special tokens, and mixtures of all."""
    rng = random.Random(seed)
    texts = ["", " ", "\n", "a", "0", "  42", "\t7", "\n\n1", "a ²", "Hello world", "  leading", "trailing  "]
    while len(texts) < count:
        texts.append("".join(_piece(rng) for _ in range(rng.choice((1, 2, 3, 5, 9, 17)))))
    return texts[:count]


def _piece(rng: random.Random) -> str:
    kind = rng.randrange(12)
    blank = rng.choice(_SPACES) if rng.random() < 0.3 else " "
    if kind < 3:
        return rng.choice(_WORDS) + blank
    if kind == 3:
        return rng.choice(_CODE)
    if kind == 4:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 8))) + rng.choice(
            ("", ".", ",", blank)
        )
    if kind == 5:
        return rng.choice(_SPACES) * rng.randint(1, 6)
    if kind == 6:
        return rng.choice(_EMOJI) + rng.choice(("", blank))
    if kind == 7:
        return rng.choice(_PUNCTUATION) * rng.randint(1, 3) + rng.choice(("", blank))
    if kind == 8:
        return "".join(chr(rng.randint(0x20, 0x7E)) for _ in range(rng.randint(1, 12)))
    if kind == 9:
        return "".join(_any_character(rng) for _ in range(rng.randint(1, 4)))
    if kind == 10:
        return rng.choice(_SPECIAL) if rng.random() < 0.3 else rng.choice(_WORDS).upper() + blank
    return (
        rng.choice(_CONTROL) if rng.random() < 0.2 else rng.choice(_WORDS) + rng.choice(_PUNCTUATION) + blank
    )


def _any_character(rng: random.Random) -> str:
    """Any assigned-looking character of planes 0 to 2 that is no surrogate and encodes in bytes up to f0."""
    while True:
        code = rng.choice(
            (rng.randint(0xA0, 0x2FFF), rng.randint(0x3000, 0xD7FF), rng.randint(0x1F300, 0x1FAFF))
        )
        if not 0xD800 <= code <= 0xDFFF:
            return chr(code)
