"""GET /v1/models and /v1/models/{id}, in the shape that the caller's client knows."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request, Response

from services.gateway.admission import check_model
from services.gateway.gateway import Gateway
from services.gateway.messages_api.models import ANTHROPIC_VERSION, ModelInfo, ModelInfoList
from services.gateway.openai_schema.models import ModelCard, ModelList
from services.gateway.openapi import describes


def models_router(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["models"])

    def card() -> ModelCard:
        facts = gateway.facts
        return ModelCard(
            id=facts.name,
            created=facts.created,
            root=facts.name,
            max_model_len=gateway.max_context,
            vocab_size=facts.vocab_size,
        )

    @router.get(
        "/v1/models", response_model=None, openapi_extra=describes(None, ModelList), summary="The model of this cell"
    )
    async def list_models(http: Request) -> Response:
        if ANTHROPIC_VERSION in http.headers:
            return _json(ModelInfoList.of([_info(card())]))
        return _json(ModelList(data=[card()]))

    @router.get(
        "/v1/models/{model:path}",
        response_model=None,
        openapi_extra=describes(None, ModelCard),
        summary="One model by its name",
    )
    async def get_model(http: Request, model: str) -> Response:
        check_model(model, gateway.facts.name)
        return _json(_info(card()) if ANTHROPIC_VERSION in http.headers else card())

    return router


def _info(card: ModelCard) -> ModelInfo:
    created = datetime.fromtimestamp(card.created, UTC).isoformat(timespec="seconds")
    return ModelInfo(id=card.id, display_name=card.id, created_at=created, max_input_tokens=card.max_model_len)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
