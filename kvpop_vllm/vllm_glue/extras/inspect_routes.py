"""Inspect page in vLLM's HTTP server: the page at ``/inspect``, its data under ``/v1``, which needs the API key."""

import asyncio
import base64
import ipaddress
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse
from vllm.logger import init_logger
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

import kvpop_vllm
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, requested

logger = init_logger("vllm.kvpop_vllm")
PAGE = Path(kvpop_vllm.__file__).with_name("inspect_page")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of all answers but errors: browsers load nothing from elsewhere, and keep nothing."""


def _is_loopback(host: str | None) -> bool:
    """Return whether a host name or address is this machine's own."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def check_local(request: Request) -> None:
    """Check that a request comes from this machine, and in a browser from the page itself.

    The name in its Host header must be this machine's too: a foreign page may have its own name resolve to 127.0.0.1.

    Raises:
        HTTPException: it does not (403).
    """
    client, origin = request.client.host if request.client else None, request.headers.get("origin")
    passed_on = {"forwarded", "x-forwarded-for"} & set(request.headers.keys())  # by a proxy, whose word is not enough
    own_origin = f"{request.url.scheme}://{request.url.netloc}"
    if (
        passed_on
        or not _is_loopback(client)
        or not _is_loopback(request.url.hostname)
        or origin not in (None, own_origin)
    ):
        port = request.url.port or 80
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            f"the inspect page answers this machine alone: open http://localhost:{port}/inspect on it, or from elsewhere through"
            f" 'ssh -L {port}:localhost:{port} HOST'",
        )


def check_inspected(request: Request) -> None:
    """Check that the engine of this app has a recorder. A process may serve other engines too.

    Raises:
        HTTPException: it has none (404).
    """
    vllm_config = request.app.state.vllm_config
    if not requested(vllm_config) or not engine_policy(vllm_config).settings.inspect:
        raise HTTPException(HTTPStatus.NOT_FOUND, "this server has no inspect page: start it with --kv-inspect")


router = APIRouter(dependencies=[Depends(check_local), Depends(check_inspected)], include_in_schema=False)


def attach_endpoint_plugins(original, app: FastAPI, *args, **kwargs) -> None:
    """Wrap the adding of routes to a server: add those of the inspect page."""
    original(app, *args, **kwargs)
    app.include_router(router)
    if requested(app.state.args):
        logger.info("inspect page: http://localhost:%s/inspect on this machine (--kv-inspect)", app.state.args.port)


@router.get("/inspect")
async def page() -> FileResponse:
    """Return the page, which holds no data."""
    return FileResponse(PAGE / "index.html", headers=HEADERS)


@router.get("/inspect/{name}")
async def part(name: str) -> FileResponse:
    """Return the page's script or style sheet."""
    if name not in ("inspect.js", "inspect.css"):
        raise HTTPException(HTTPStatus.NOT_FOUND, f"the inspect page has no {name}")
    return FileResponse(PAGE / name, headers=HEADERS)


@router.get("/v1/kv_inspect")
async def requests(request: Request) -> JSONResponse:
    """Return the numbers of all requests."""
    client = request.app.state.engine_client
    summary = await client.engine_core.call_utility_async("kvpop_inspect")
    return JSONResponse(summary | {"model": client.model_config.served_model_name}, headers=HEADERS)


@router.get("/v1/kv_inspect/{name:path}")
async def details(name: str, request: Request) -> JSONResponse:
    """Return the tokens of a request as texts, and when each left each head, as base64 of int32."""
    client = request.app.state.engine_client
    record = await client.engine_core.call_utility_async("kvpop_inspect_request", name)
    if record is None:
        raise HTTPException(
            HTTPStatus.NOT_FOUND, f"the request {name!r} is not running, and not among the last that ended"
        )
    return await asyncio.to_thread(_readable, record, client.renderer.tokenizer)


def _readable(record: dict, tokenizer) -> JSONResponse:
    """Return the answer of :func:`details`. Without a tokenizer, tokens are their ids."""
    ids, cartridge_tokens = record["tokens"], record["cartridge_tokens"]
    texts = [f"<{token}>" for token in ids] if tokenizer is None else convert_ids_list_to_tokens(tokenizer, ids)
    texts[:cartridge_tokens] = ["▪"] * min(cartridge_tokens, len(texts))  # slots of cartridges stand for no token
    left = base64.b64encode(record["left"]).decode()
    return JSONResponse(record | {"tokens": texts, "left": left}, headers=HEADERS)
