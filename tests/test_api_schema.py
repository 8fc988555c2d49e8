"""The API keeps what its OpenAPI document promises: requests made from the document, right and wrong ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from live_fake import HTTP, running

from outrider.config import load
from outrider.entrypoints.app import ServerState, create_app
from outrider.entrypoints.generation import Gate

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import CHECKS  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

# In CI a few seconds for each route; more with OUTRIDER_API_EXAMPLES.
EXAMPLES = int(os.environ.get("OUTRIDER_API_EXAMPLES", "10"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running("log_level=error", "request_timeout=3") as (address, _):
        yield address


def the_document() -> Any:
    configuration = load({})
    gate = Gate(configuration.server, configuration.engine.max_num_seqs)
    return create_app(ServerState(configuration, gate)).openapi()


schema = schemathesis.openapi.from_dict(the_document())


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_one_that_the_document_names(case: Any, url: str) -> None:
    """Statuses, media types and bodies as documented; nothing that the schema forbids is accepted.

    What the schema allows may be refused all the same (a prompt too long, a tool choice without tools).
    """
    checks = [check for check in CHECKS.get_all() if check is not positive_data_acceptance]
    case.call_and_validate(base_url=url, checks=checks, timeout=120)
    assert HTTP.get(url + "/health").status_code == 200


def test_the_document_names_every_status_of_the_server(url: str) -> None:
    document = HTTP.get(url + "/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "404", "408", "413", "429", "500", "503"} == set(chat["responses"])
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    assert "security" not in document


def test_keys_are_in_the_document_where_there_are_keys() -> None:
    with running("api_key=secret") as (url, _):
        document = HTTP.get(url + "/openapi.json").json()
    assert document["security"] == [{"key": []}]
    assert "401" in document["paths"]["/tokenize"]["post"]["responses"]
