"""From a Triton model's parameters to an instance of the role that they name."""

from __future__ import annotations

import json

from sangam_backend.config import EngineConfig
from sangam_backend.engine import ALONE
from sangam_backend.server.channel import Channel, Start
from sangam_backend.server.instance import Instance
from sangam_backend.server.roles import DecodeInstance, PrefillInstance


def open_instance(start: Start, channel: Channel) -> Instance:
    """Makes an instance and starts it.

    Raises:
        ConfigError: a parameter or a checkpoint that cannot be served.
    """
    parameters = json.loads(start.args["model_config"]).get("parameters", {})
    config = EngineConfig.from_strings(
        {name: value["string_value"] for name, value in parameters.items()}
    )
    instance: Instance
    if config.role == "prefill":
        instance = PrefillInstance(start, channel, config)
    elif config.role == "decode":
        instance = DecodeInstance(start, channel, config)
    else:
        instance = Instance(start, channel, config, ALONE)
    instance.start()
    return instance
