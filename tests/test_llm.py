"""Offline use, as the documentation shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.config_fields import ConfigError
from outrider.llm import LLM
from outrider.request import FinishReason, SamplingParams

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(builtin_model: Path) -> Iterator[LLM]:
    with LLM(str(builtin_model), max_model_len=512, num_kv_blocks=64) as llm:
        yield llm


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["One, two, three,", "The capital of France is", "def add(a, b):\n    return"]
    together = llm.generate(prompts, GREEDY, use_progress_bar=True)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [c.text for c in together] == [c.text for c in alone]
    assert "Paris" in together[1].text
    for completion in together:
        assert completion.usage.completion_tokens == len(completion.token_ids) == 12
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.speculation["steps"] <= 12
        assert llm.tokenizer.decode(completion.token_ids) == completion.text


def test_prompts_may_be_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is")
    assert (
        llm.generate(ids, GREEDY)[0].token_ids
        == llm.generate("The capital of France is", GREEDY)[0].token_ids
    )
    assert len(llm.generate([ids, ids], GREEDY)) == 2


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    first, second = llm.generate(["Hello", "Hello"], [GREEDY, SamplingParams(max_tokens=3, seed=7)])
    assert (len(first.token_ids), len(second.token_ids), second.seed) == (12, 3, 7)
    with pytest.raises(ValueError, match="2 prompts need as many"):
        llm.generate(["a", "b"], [GREEDY])


def test_predictions_save_steps_and_change_nothing(builtin_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = ["The capital of France is", "One fine day"]
    with LLM(
        str(builtin_model), max_model_len=256, num_kv_blocks=32, max_num_seqs=2,
        speculative_config={"method": "ngram", "adaptive": False},
    ) as llm:  # fmt: skip
        plain = llm.generate(prompts, params)
        right = plain[0].text
        half = llm.tokenizer.encode(right)[:12] + llm.tokenizer.encode(" or so they say,")
        predicted = llm.generate(prompts, params, predictions=[right, None])
        wrong = llm.generate(prompts[0], params, predictions=[half])
        assert [c.token_ids for c in predicted] == [c.token_ids for c in plain]
        assert wrong[0].token_ids == plain[0].token_ids
        assert predicted[0].speculation["steps"] < plain[0].speculation["steps"] * 2 / 3
        assert predicted[0].speculation["by_source"]["predicted"]["accepted_tokens"] > 20
        assert "predicted" not in predicted[1].speculation["by_source"]
        with pytest.raises(ValueError, match="1 prompts need a list of as many predictions"):
            llm.generate("Hello", params, predictions=["a", "b"])
        with pytest.raises(ValueError, match="prediction_token_ids must hold token ids in"):
            llm.generate("Hello", params, predictions=[[-1]])


def test_past_outputs_survive_in_a_file_and_a_damaged_one_is_refused(
    builtin_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "drafts"
    options: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 32, "max_num_seqs": 2}
    options["speculative_config"] = {"method": "suffix", "draft_memory_file": str(file), "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(builtin_model), **options) as first:
        (before,) = first.generate("Rivers are", params)
    assert file.stat().st_size > 100
    with LLM(str(builtin_model), **options) as second:
        (after,) = second.generate("Rivers are", params)
    assert after.token_ids == before.token_ids
    assert after.speculation["steps"] < before.speculation["steps"] / 2
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"drafts is damaged \(its checksum differs"):
        LLM(str(builtin_model), **options)


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.usage.prompt_tokens > 10
    assert llm.chat([messages, messages], GREEDY)[1].text == answer.text


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ValueError, match="600 tokens, but at most 511"):
        llm.generate([[5], [5] * 600], GREEDY)
    assert not llm.engine.has_work
    assert llm.generate("Hello", GREEDY)[0].text


def test_unknown_keywords_are_errors() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_seq=3)
