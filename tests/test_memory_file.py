"""Past outputs in a file: what comes back, and that nothing else is ever read or overwritten."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from outrider.config_fields import ConfigError
from outrider.spec_decode.memory_file import MAGIC, MemoryFile

TEXTS = [(b"t" * 16, [1, 2, 3]), (b"u" * 16, []), (b"t" * 16, list(range(100)))]


def saved(path: Path) -> MemoryFile:
    file = MemoryFile(path, "a vocabulary", 100)
    file.save(TEXTS)
    return file


def test_what_was_saved_comes_back_in_order(tmp_path: Path) -> None:
    file = saved(tmp_path / "memory")
    assert file.load() == TEXTS
    file.save(TEXTS[:1])
    assert file.load() == TEXTS[:1]
    assert os.listdir(tmp_path) == ["memory"]
    assert stat.S_IMODE((tmp_path / "memory").stat().st_mode) == 0o600  # it is what people wrote


def test_no_file_is_an_empty_memory_if_one_can_be_made(tmp_path: Path) -> None:
    assert MemoryFile(tmp_path / "new", "v", 100).load() == []
    with pytest.raises(ConfigError, match="cannot be made: its folder is not there"):
        MemoryFile(tmp_path / "missing" / "new", "v", 100).load()
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        MemoryFile(tmp_path, "v", 100).load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a file of past outputs"),
        (b"my thesis, chapter one", "is not a file of past outputs"),
        (MAGIC, "is damaged .it is cut off"),
        (MAGIC + b"\x02" + b"\0" * 60, "has format 2, and this version of Outrider reads 1"),
        (MAGIC + b"\x01\0\0\0" + b"\0" * 60, "is damaged .its checksum differs"),
    ],
    ids=["empty", "foreign", "cut off", "later", "checksum"],
)
def test_what_is_no_memory_is_refused_in_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "memory"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        MemoryFile(path, "v", 100).load()
    assert "move it away or change draft_memory_file" in str(raised.value)
    assert path.read_bytes() == content


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "memory")
    with pytest.raises(ConfigError, match="holds the token ids of another tokenizer"):
        MemoryFile(tmp_path / "memory", "another vocabulary", 100).load()
    with pytest.raises(ConfigError, match="holds ids that no token has"):
        MemoryFile(tmp_path / "memory", "a vocabulary", 99).load()


def test_no_damage_gets_through(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    file = saved(path)
    data = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        if rng.random() < 0.3:
            broken = data[: rng.randrange(len(data))]
        else:
            at = rng.randrange(len(data))
            broken = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        path.write_bytes(broken)
        with pytest.raises(ConfigError):
            file.load()


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path / "memory")

    def fail(source: str, target: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        file.save([])
    assert file.load() == TEXTS and os.listdir(tmp_path) == ["memory"]
