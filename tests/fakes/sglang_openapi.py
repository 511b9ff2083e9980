"""An excerpt of /openapi.json of SGLang 0.5.23, written by hand: the routes of runs, with some of the fields
of their bodies. tests/sglang/test_version_check.py compares it with a real server's."""

from __future__ import annotations

from typing import Any

QUESTION: dict[str, Any] = {"responses": {"200": {"description": "Successful Response"}}}


def command(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return QUESTION | {"requestBody": {"content": content, "required": True}}


def fields(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"title": name} for name in names}}


OPENAPI: dict[str, Any] = {
    "openapi": "3.1.0",
    "paths": {
        "/ready": {"get": QUESTION},
        "/server_info": {"get": QUESTION},
        "/model_info": {"get": QUESTION},
        "/v1/models": {"get": QUESTION},
        "/generate": {"post": command("GenerateReqInput"), "put": command("GenerateReqInput")},
        "/classify": {"post": command("EmbeddingReqInput"), "put": command("EmbeddingReqInput")},
        "/abort_request": {"post": command("AbortReq")},
        "/pause_generation": {"post": command("PauseGenerationReqInput")},
        "/continue_generation": {"post": command("ContinueGenerationReqInput")},
        "/flush_cache": {"get": QUESTION, "post": QUESTION},
        "/update_weight_version": {"post": command("UpdateWeightVersionReqInput")},
        "/update_weights_from_disk": {"post": command("UpdateWeightFromDiskReqInput")},
        "/init_weights_update_group": {"post": command("InitWeightsUpdateGroupReqInput")},
        "/begin_weight_update": {"post": command("BeginWeightUpdateReqInput")},
        "/update_weights_from_distributed": {"post": command("UpdateWeightsFromDistributedReqInput")},
        "/end_weight_update": {"post": command("EndWeightUpdateReqInput")},
        "/destroy_weights_update_group": {"post": command("DestroyWeightsUpdateGroupReqInput")},
        "/load_lora_adapter": {"post": command("LoadLoRAAdapterReqInput")},
        "/unload_lora_adapter": {"post": command("UnloadLoRAAdapterReqInput")},
        "/release_memory_occupation": {
            "get": command("ReleaseMemoryOccupationReqInput"),
            "post": command("ReleaseMemoryOccupationReqInput"),
        },
        "/resume_memory_occupation": {
            "get": command("ResumeMemoryOccupationReqInput"),
            "post": command("ResumeMemoryOccupationReqInput"),
        },
    },
    "components": {
        "schemas": {
            "GenerateReqInput": fields(
                "rid",
                "text",
                "input_ids",
                "sampling_params",
                "return_logprob",
                "logprob_start_len",
                "top_logprobs_num",
                "stream",
                "return_routed_experts",
                "routed_experts_start_len",
                "lora_path",
                "cache_salt",
            ),
            "EmbeddingReqInput": fields("rid", "text", "input_ids"),
            "AbortReq": fields("rid", "abort_all"),
            "PauseGenerationReqInput": fields("mode"),
            "ContinueGenerationReqInput": fields("torch_empty_cache"),
            "UpdateWeightVersionReqInput": fields("new_version", "abort_all_requests"),
            "UpdateWeightFromDiskReqInput": fields(
                "model_path", "load_format", "abort_all_requests", "weight_version", "flush_cache"
            ),
            "InitWeightsUpdateGroupReqInput": fields(
                "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"
            ),
            "BeginWeightUpdateReqInput": fields("selector"),
            "UpdateWeightsFromDistributedReqInput": fields(
                "names",
                "dtypes",
                "shapes",
                "group_name",
                "flush_cache",
                "weight_version",
                "load_format",
                "selector",
            ),
            "EndWeightUpdateReqInput": fields("rid"),
            "DestroyWeightsUpdateGroupReqInput": fields("group_name"),
            "LoadLoRAAdapterReqInput": fields("lora_name", "lora_path", "pinned"),
            "UnloadLoRAAdapterReqInput": fields("lora_name"),
            "ReleaseMemoryOccupationReqInput": fields("tags"),
            "ResumeMemoryOccupationReqInput": fields("tags"),
        }
    },
}
