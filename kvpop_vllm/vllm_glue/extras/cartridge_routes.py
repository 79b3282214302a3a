"""Cartridges in vLLM's HTTP server: listed as models, loaded and unloaded while it runs."""

import asyncio
import os
from asyncio import Lock
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from kvpop_vllm.config import ConfigError
from kvpop_vllm.vllm_glue.extras.cartridge_names import NamedCartridge, ServedCartridge, names_of
from kvpop_vllm.vllm_glue.start.engine_policy import requested

router = APIRouter()
_lock = Lock()
Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadCartridge(BaseModel):
    """Body of ``POST /v1/load_kv_cartridge``."""

    name: Name
    path: Annotated[str, Field(min_length=1)]


class UnloadCartridge(BaseModel):
    """Body of ``POST /v1/unload_kv_cartridge``."""

    name: Name


async def init_static_loras(original, self, *args, **kwargs) -> None:
    """Wrap the listing of LoRA adapters: list cartridges too."""
    await original(self, *args, **kwargs)
    if requested(self.engine_client.vllm_config):
        for name, cartridge in names_of(self.engine_client.vllm_config).served.items():
            _list(self, name, cartridge)


def _list(models, name: str, cartridge: ServedCartridge) -> None:
    """List a cartridge among the models of a server, whose base model is its parent."""
    if name in models.lora_requests or models.is_base_model(name):
        raise ConfigError(f"the name {name!r} is taken: give the cartridge another")
    number = models.lora_id_counter.inc(1)
    models.lora_requests[name] = NamedCartridge(name, number, cartridge.folder, models.base_model_paths[0].name)


def attach_endpoint_plugins(original, app: FastAPI, *args, **kwargs) -> None:
    """Wrap the adding of routes to a server: add those of this module."""
    original(app, *args, **kwargs)
    app.include_router(router)


def changeable(request: Request) -> tuple:
    """Return the models that an app lists, and its cartridges.

    Raises:
        HTTPException: the app's engine has no policy, as a process may serve other engines too (404), or there are
            several front ends or engines, which would not all know of a change (400).
    """
    vllm_config = request.app.state.vllm_config
    if not requested(vllm_config):
        raise HTTPException(HTTPStatus.NOT_FOUND, "this server has no cartridges: start it with --kv-policy")
    several = request.app.state.args.api_server_count not in (None, 1)
    if several or vllm_config.parallel_config.data_parallel_size > 1:
        message = "other servers or engines would not know of it: set --api-server-count and --data-parallel-size to 1"
        raise HTTPException(HTTPStatus.BAD_REQUEST, message)
    models = request.app.state.openai_serving_models
    return models, names_of(models.engine_client.vllm_config)


@router.post("/v1/load_kv_cartridge")
async def load_kv_cartridge(body: LoadCartridge, request: Request):
    """Load the cartridge in a folder of the server's machine, and serve it under a name."""
    models, names = changeable(request)
    async with _lock:
        if body.name in models.lora_requests or body.name in names.served or models.is_base_model(body.name):
            message = f"the name {body.name!r} is taken: unload it, or use another"
            raise HTTPException(HTTPStatus.BAD_REQUEST, message)
        if not os.path.isdir(body.path):
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"{body.path!r} is not a folder of this machine: give one")
        try:
            cartridge = await asyncio.to_thread(names.read, body.name, body.path)
            core = models.engine_client.engine_core
            await core.call_utility_async("kvpop_load_cartridge", body.name, cartridge.folder, *cartridge.placed)
        except Exception as error:  # an engine's error comes as an exception of another class
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        # requests may name it once the engine has it
        names.served[body.name] = cartridge
        _list(models, body.name, cartridge)
    return {"name": body.name, "slots": cartridge.placed.slots}


@router.post("/v1/unload_kv_cartridge")
async def unload_kv_cartridge(body: UnloadCartridge, request: Request):
    """Stop serving a cartridge and free its blocks, unless unfinished requests use it."""
    models, names = changeable(request)
    async with _lock:
        if (cartridge := names.served.pop(body.name, None)) is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"the cartridge {body.name!r} does not exist")
        models.lora_requests.pop(body.name, None)  # requests name it no longer
        core, using = models.engine_client.engine_core, None
        try:
            using = await core.call_utility_async("kvpop_unload_cartridge", body.name, cartridge.placed.digest)
        finally:
            if using != 0:
                names.served[body.name] = cartridge
                _list(models, body.name, cartridge)
    if using:
        message = f"{using} requests use the cartridge {body.name!r}: unload it when they are done"
        raise HTTPException(HTTPStatus.CONFLICT, message)
    return {"name": body.name}
