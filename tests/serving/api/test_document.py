"""The OpenAPI document is true: schemathesis asks everything it allows, and much that it does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.api.conftest import Serve


@pytest.mark.timeout(600)
def test_schemathesis_finds_nothing(serve: Serve, tmp_path: Path) -> None:
    running = serve(max_tokens=4, limits={"max_tokens": 64}, engine={"lanes": 8, "queue": 64, "threads": None})
    running.http().post("/v1/sessions", json={"id": "ada"}).raise_for_status()
    command = [
        str(Path(sys.executable).parent / "st"), "run", f"{running.url}/openapi.json", "--max-examples", "15", "--seed", "1",
        "--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance", "--request-timeout", "20",
        "--no-color",
    ]  # fmt: skip
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-6000:]


def test_every_route_has_examples_or_needs_none(serve: Serve) -> None:
    document = serve().http().get("/openapi.json").json()
    for name in ("CompletionRequest", "ChatRequest", "CreateSession", "AppendRequest", "ForkRequest", "MigrateRequest"):
        assert document["components"]["schemas"][name]["examples"], name
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), (method, path)
            assert {"400", "404", "429", "500", "503"} <= operation["responses"].keys(), (method, path)
            assert "422" not in operation["responses"]
