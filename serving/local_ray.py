"""The Ray that `pmi serve` starts for itself: its token, and the settings that must be in its environment before it starts."""

import atexit
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lm.errors import UserError
from lm.machine import free_port

if TYPE_CHECKING:
    from serving.config import HttpSettings

BASE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's own 15 starves replicas beside any other program
    # requests and tokens go from process to process over gRPC, which costs far less than Ray's object store
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # of gRPC's own 4 MiB per message an exported session, or a long prompt, is more
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    # nothing in our replicas blocks their event loop, so it needs no second one beside it
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""What every cluster that runs the service should have (docs/serving.md)."""


def environment(http: "HttpSettings", given: Mapping[str, str]) -> dict[str, str]:
    """What Ray's processes need besides what is `given`, which wins."""
    made = BASE | token(given)
    if http.throughput:
        folder = tempfile.mkdtemp(prefix="pmi-haproxy-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        made |= {
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            # its own names, so that two services can run on one machine
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            # Ray's 30 s are for load balancers far away; HAProxy here hears of a replica that leaves at once
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        }
    return {name: value for name, value in made.items() if name not in given}


def token(given: Mapping[str, str]) -> dict[str, str]:
    """Ray's ports execute what they are sent, so they ask for a token: the one that is given, else one of our own in a file.

    UserError where the given one cannot be used. RAY_AUTH_MODE=disabled turns it off.
    """
    mode = given.get("RAY_AUTH_MODE", "token").lower()
    if mode == "disabled":
        return {}
    if mode != "token":
        raise UserError(f"RAY_AUTH_MODE={mode!r}: must be token (the default) or disabled")
    if "RAY_AUTH_TOKEN" in given:
        if not given["RAY_AUTH_TOKEN"].strip():
            raise UserError("RAY_AUTH_TOKEN is empty: unset it, and `pmi serve` makes a token of its own")
        return {"RAY_AUTH_MODE": "token"}
    path, own = token_file(given), "RAY_AUTH_TOKEN_PATH" not in given
    if own and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        trial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        trial.touch(mode=0o600)
        trial.write_text(secrets.token_hex(32))
        try:
            os.link(trial, path)  # of two services that start at once, both take the first one's
        except FileExistsError:
            pass
        finally:
            trial.unlink()
    problem = _problem(path, own)
    if problem:
        raise UserError(f"Ray's token in {path}: {problem}")
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def token_file(given: Mapping[str, str]) -> Path:
    """Where the token is, if it is not in the environment itself."""
    from serving.sessions.opening import default_file

    named = given.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else default_file(given).with_name("ray-token")


def _problem(path: Path, own: bool) -> str | None:
    """What is wrong with a file that must hold a token."""
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except FileNotFoundError:
        return "no such file; make it (`openssl rand -hex 32`), or unset RAY_AUTH_TOKEN_PATH"
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read ({error})"
    if not text:
        return "empty; remove the file, or write a token into it"
    if own and mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"mode {mode & 0o777:o} lets others read it; remove the file, and a new one is made"
    return None
