"""POST /sample, which an engine adds to vLLM's server: tokens in, tokens with log-probabilities and versions out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import vllm.envs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs, PromptLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from areal_megatron.engine import answers
from areal_megatron.engine.answers import RawAnswer, RawArray
from areal_megatron.engine.server import SERVED_MODEL


class SampleRoute:
    """ASGI middleware that answers POST /sample and leaves everything else to vLLM."""

    def __init__(self, app):
        vllm.envs.enable_envs_cache()  # as in vLLM's other processes: it asks for variables with every token
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == answers.PATH:
            response = await _sample(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _sample(request: Request) -> Response:
    """Samples what is asked for and answers with a list of RawAnswer, or with status 400 if vLLM refuses the request.

    Body: {"request_id": str, "token_ids": [int], "sampling_params": {…} as vLLM names them, "cache_salt": str or none,
    "adapter": its name or folder, or a name of the model without any; by default the policy's, or none}. A client that
    leaves has its request aborted.
    """
    body = msgspec.json.decode(await request.body())
    try:
        # flat: no dict for each token. The parameters belong to this request alone, so nobody need copy them.
        final_only = {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True, "skip_clone": True}
        sampling = SamplingParams(**body["sampling_params"], **final_only)
        prompt = tokens_input(body["token_ids"], cache_salt=body.get("cache_salt"))
        engine = request.app.state.engine_client
        adapter = await _adapter(request.app.state.openai_serving_models, body.get("adapter"))
        generating = engine.generate(prompt, sampling, body["request_id"], lora_request=adapter)
        answered = await _unless_left(request, generating)
    except (VLLMClientError, ValueError) as e:
        return JSONResponse({"error": str(e)}, status_code=400)
    if answered is None:
        return Response(status_code=499)  # nobody reads it
    raw = [_raw(output, answered.prompt_logprobs) for output in answered.outputs]
    return Response(answers.encode(raw), media_type=answers.CONTENT_TYPE)


async def _adapter(models: Any, chosen: str | None) -> LoRARequest | None:
    """Returns the adapter to answer with, None for none. The first request with a folder has it loaded; vLLM drops the
    one that was used longest ago where it has no room, and loads that again when it is asked for."""
    name = chosen or SERVED_MODEL
    problem = f"no adapter {chosen!r} is served"
    if name not in models.lora_requests and Path(name).is_absolute():
        # Of several first requests at once the others are told here that it is there.
        told = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=name))
        problem = told if isinstance(told, str) else told.error.message
    if chosen and name not in models.lora_requests and not models.is_base_model(chosen):
        raise ValueError(problem)
    return models.lora_requests.get(name)


async def _unless_left(request: Request, generating: AsyncGenerator[RequestOutput]) -> RequestOutput | None:
    """Returns the last output; None if the client has left before."""
    answering = asyncio.ensure_future(_last(generating))
    leaving = asyncio.ensure_future(request.receive())  # the body has been read: what comes next is that it has left
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None
    finally:
        answering.cancel()  # vLLM aborts the request then
        leaving.cancel()


async def _last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


def _raw(output: CompletionOutput, prompt: PromptLogprobs | None) -> RawAnswer:
    assert isinstance(output.logprobs, FlatLogprobs) and isinstance(prompt, FlatLogprobs | None)  # as asked for
    return RawAnswer(
        tokens=np.array(output.token_ids, np.int32).tobytes(),
        logprobs=np.array(output.logprobs.logprobs, np.float32).tobytes(),
        versions=[(span.version, span.start, span.end) for span in output.weight_versions or ()],
        finish_reason=output.finish_reason or "",
        routes=None if output.routed_experts is None else RawArray.of(output.routed_experts),
        prompt_logprobs=b"" if prompt is None else np.array(prompt.logprobs, np.float32).tobytes(),
        prompt_tokens=b"" if prompt is None else np.array(prompt.token_ids, np.int32).tobytes(),
    )
