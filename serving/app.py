"""The Serve application, for clusters that run already.

serve run serving.app:build checkpoint=runs/demo/model store=redis://host:6379/0
serve deploy deploy/serve/cluster.yaml
"""

from typing import Any

from ray import serve

from lm.errors import UserError
from serving.config import load_serve_config
from serving.deployments import application


def build(args: dict[str, Any]) -> serve.Application:
    """`config` (a file or a shipped name), `checkpoint` (one or several by comma) and any other key of the configuration."""
    changes = dict(args)
    path = changes.pop("config", None)
    folders = str(changes.pop("checkpoint", "") or "")
    if folders:
        changes["models"] = [{"checkpoint": folder} for folder in folders.split(",")]
    config = load_serve_config(path, changes)
    if not [model for model in config.models if model.use == "all"]:
        raise UserError("no model to serve: give checkpoint=DIR, or `models` in the configuration")
    return application(config)
