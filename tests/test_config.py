"""Configuration: strict, with one order of precedence, and errors that help."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import (
    FASTDEPLOY_KEYS,
    ConfigError,
    EngineConfig,
    ServerConfig,
    SpeculativeConfig,
    load,
    read_yaml,
)
from outrider.config_fields import field_aliases

NAMES = [field.name for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)]


def write(folder: Path, text: str) -> str:
    path = folder / "outrider.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_are_the_contract() -> None:
    config = EngineConfig()
    assert (config.model, config.device, config.block_size) == ("smollm2-135m", "auto", 32)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.memory_utilization) == (64, 2048, 0.85)
    assert config.enable_prefix_caching and config.enable_chunked_prefill and config.seed == 0
    assert config.speculative_config == SpeculativeConfig(
        method="auto", prompt_lookup_max=5, prompt_lookup_min=2
    )
    server = ServerConfig()
    assert (server.host, server.port, server.max_concurrency, server.max_queue_size) == (
        "127.0.0.1", 8000, 2048, 4096,
    )  # fmt: skip
    assert load({}).engine == config


def test_a_typed_flag_beats_yaml_which_beats_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "max_num_seqs: 8\nport: 9000\nblock_size: 64\n")
    plan = load({"port": "8000", "block_size": "32"}, file)
    assert (plan.engine.max_num_seqs, plan.server.port, plan.engine.block_size) == (8, 8000, 32)
    assert plan.origins == {"max_num_seqs": file, "port": "flag", "block_size": "flag"}
    text = plan.describe()
    assert f"max_num_seqs = 8 ({file})" in text
    assert "port = 8000 (flag)" in text and "host = 127.0.0.1 (default)" in text


def test_hyphens_json_nested_mappings_and_aliases_are_understood(tmp_path: Path) -> None:
    nested = (
        "speculative-config:\n  method: ngram\n  max_ngram_size: 4\n  tree: 12\ngpu-memory-utilization: 0.5\n"
    )
    as_json = 'speculative_config: \'{"method": "ngram", "prompt_lookup_max": 4, "tree": 12}\'\n'
    for text in (nested, as_json + "memory_utilization: '0.5'\n"):
        engine = load({}, write(tmp_path, text)).engine
        assert engine.speculative_config == SpeculativeConfig(method="ngram", prompt_lookup_max=4, tree=12)
        assert engine.memory_utilization == 0.5


def test_words_that_yaml_reads_as_something_else_mean_what_they_say(tmp_path: Path) -> None:
    engine = load({}, write(tmp_path, "speculative_config: {method: off}\nmax_model_len: auto\n")).engine
    assert engine.speculative_config.method == "off" and engine.max_model_len is None
    assert load({}, write(tmp_path, "speculative_config: {verify_strategy: 2}")).engine == EngineConfig()
    assert EngineConfig(kv_cache_dtype="FP16").kv_cache_dtype == "float16"


def test_fastdeploy_keys_without_meaning_give_one_warning_each(tmp_path: Path) -> None:
    file = write(tmp_path, "".join(f"{key}: 1\n" for key in FASTDEPLOY_KEYS))
    plan = load({}, file)
    assert len(plan.warnings) == len(FASTDEPLOY_KEYS)
    assert all(any(w.startswith(key) for w in plan.warnings) for key in FASTDEPLOY_KEYS)
    assert plan.engine == EngineConfig() and plan.server == ServerConfig()


@given(st.sampled_from(NAMES), st.data())
def test_a_misspelt_key_is_an_error_that_names_the_right_one(name: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(1, len(name) - 1))
    kind = data.draw(st.sampled_from(["drop", "double", "swap"]))
    typo = {
        "drop": name[:place] + name[place + 1 :],
        "double": name[:place] + name[place] + name[place:],
        "swap": name[: place - 1] + name[place] + name[place - 1] + name[place + 1 :],
    }[kind]
    if typo in NAMES or typo in field_aliases(EngineConfig) or len(name) < 5:
        return
    with pytest.raises(ConfigError, match="unknown configuration key") as raised:
        load({typo: "1"})
    assert "did you mean" in str(raised.value)


@given(st.dictionaries(st.text(max_size=12), st.none() | st.booleans() | st.integers() | st.text(max_size=5)))
def test_whatever_comes_is_a_configuration_or_a_config_error(values: dict[str, Any]) -> None:
    try:
        assert load(values).engine is not None
    except ConfigError as error:
        assert str(error)


@given(
    st.sampled_from([f.name for f in dataclasses.fields(EngineConfig)]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
    | st.dictionaries(st.text(max_size=5), st.integers()),
)  # fmt: skip
def test_any_value_of_a_known_key_is_taken_or_refused_with_its_name(name: str, value: Any) -> None:
    try:
        EngineConfig.from_dict({name: value})
    except ConfigError as error:
        related = ("max_num_seqs", "max_model_len", "quantization", "method", "speculative_config", "key")
        assert name in str(error) or any(word in str(error) for word in related)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seqs": "many"}, "max_num_seqs must be an integer, got 'many' .*--max-num-seqs"),
    ({"max_num_seqs": 0}, "at least 1 and at most 1024, got 0"),
    ({"max_num_seqs": True}, "must be an integer, got True"),
    ({"memory_utilization": 1.5}, "above 0 and at most 1"),
    ({"memory_utilization": float("nan")}, "got nan"),
    ({"device": "gpu"}, "must be auto or cpu, got 'gpu'"),
    ({"block_size": 33}, "must be 16 or 32 or 64 or 128, got 33"),
    ({"max_num_seqs": 512, "max_num_batched_tokens": 100}, r"at least max_num_seqs \(512\), got 100"),
    ({"max_model_len": 4096, "enable_chunked_prefill": False}, "without chunked prefill"),
    ({"quantization": "wint3"}, "wint4, wint8, none"),
    ({"quantization": {"dense": "wint4", "mo": "wint4"}}, "no part 'mo' .did you mean 'moe'"),
    ({"quantization": '{"dense": 1}'}, "a mapping"),
    ({"speculative_config": "ngram"}, "a mapping"),
    ({"speculative_config": '{"method": '}, "not valid JSON"),
    ({"speculative_config": {"metod": "ngram"}}, "unknown configuration key 'metod' .*did you mean 'method'"),
    ({"speculative_config": {"method": "ngrm"}}, "did you mean 'ngram'"),
    ({"speculative_config": {"method": "off", "prompt_lookup_max": 3}}, "method 'off' has no key"),
    ({"speculative_config": {"method": "naive", "adaptive": True}}, "method 'naive' has no key 'adaptive'"),
    ({"speculative_config": {"prompt_lookup_max": 2, "prompt_lookup_min": 3}}, "at most prompt_lookup_max"),
    ({"speculative_config": {"num_speculative_tokens": 33}}, "at most 32, got 33"),
    ({"speculative_config": {"method": "draft_model"}}, "needs model, a smaller model"),
    ({"speculative_config": {"method": "suffix", "prompt_lookup_max": 3}}, "'suffix' has no key 'prompt_lo"),
    ({"speculative_config": {"method": "ngram", "draft_memory": "tenant"}}, "'ngram' has no key 'draft_memo"),
    ({"speculative_config": {"draft_memory": "requests"}}, "did you mean 'request'"),
    ({"speculative_config": {"draft_memory": "request", "draft_memory_file": "f"}}, "keeps no past outputs"),
    ({"speculative_config": {"suffix_decoding_max_tree_depth": 1}}, "at least 2 and at most 1024, got 1"),
    ({"speculative_config": {"num_model_steps": 4, "num_speculative_tokens": 3}}, "at most num_speculative"),
    ({"speculative_config": {"verify_strategy": "topp"}}, "target_match, got 'topp': .*changes the output"),
    ({"speculative_config": {"accept_policy": "accept_all"}}, "--allow-debug-policies"),
    ({"model": "a", "Model": "b"}, "unknown configuration key 'Model'"),
    ({"max-num-seqs": 4, "max_num_seqs": 4}, "given twice"),
    ({"method": "ngram"}, "belongs into speculative_config"),
    ({"api_key": [1]}, "api_key must be a list of texts, got .hidden"),
    ({"api_key": " secret"}, "printable text without surrounding blanks; change --api-key"),
    ({"port": 70000}, "at most 65535"),
]
LATER: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"device": "cuda"}, {"splitwise_role": "prefill"},
    {"scheduler_name": "global"}, {"scheduler_name": "splitwise"}, {"scheduler_topic": "t"},
    {"plas_attention_config": {"plas_block_size": 128}}, {"kv_cache_dtype": "int8"}, {"kv_transfer": "tcp"},
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(case[0])[:60] for case in WRONG])
def test_a_wrong_value_says_what_came_what_is_allowed_and_where(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(values)


@pytest.mark.parametrize("values", LATER, ids=str)
def test_what_a_later_version_will_have_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not offered by this version of Outrider, only"):
        load(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML"), ("- a", "must hold a mapping"), ("port: 1\nport: 2", "port is given twice"),
     ("max-num-seqs: 1\nmax_num_seqs: 1", "given twice"), ("prt: 1", "did you mean 'port'"),
     ("{a: 1}: 2", "not valid YAML|unknown"), ("? [1, 2]\n: 3", "not valid YAML|unknown"),
     ("max_num_seqs: x", "outrider.yaml: max_num_seqs must be an integer")],
)  # fmt: skip
def test_a_bad_yaml_file_is_told_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as raised:
        load({}, file)
    assert "outrider.yaml" in str(raised.value)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load({}, tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load({}, tmp_path / "binary.yaml")
    assert read_yaml(write(tmp_path, "")) == {}


def test_keys_come_from_the_environment_unless_given_and_are_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "alpha, beta")
    plan = load({})
    assert plan.server.api_key == ("alpha", "beta") and plan.origins["api_key"] == "OUTRIDER_API_KEY"
    assert "alpha" not in plan.describe() and "beta" not in plan.describe()
    assert load({"api_key": ["gamma"]}).server.api_key == ("gamma",)


def test_configurations_survive_a_trip_through_json() -> None:
    config = EngineConfig.from_dict(
        {"speculative_config": {"method": "ngram", "tree": 3}, "quantization": "wint8"}
    )
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    speculative = SpeculativeConfig(**values.pop("speculative_config"))
    assert EngineConfig(**values, speculative_config=speculative) == config


def test_every_field_is_documented_and_every_default_is_valid() -> None:
    for cls in (EngineConfig, ServerConfig, SpeculativeConfig):
        for field in dataclasses.fields(cls):
            assert field.metadata["help"], field.name
            cls(**{field.name: field.default})
