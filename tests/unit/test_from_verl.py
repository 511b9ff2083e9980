"""verl's keys are answered all at once, from the table that makes docs/start/from_verl.md."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import pytest

from asyncrl import cli
from asyncrl.config import RunConfig
from asyncrl.config.base import leaves
from asyncrl.config.composition import compose, default_tree, recompose, verl_rows
from asyncrl.errors import ConfigError

NAMED = ["name=x", "model.path=m", "data.train=t"]
# What the PPO quickstart and DAPO scripts of verl set; later words of a line are in the section of its first.
QUICKSTART = """
data.train_files val_files train_batch_size max_prompt_length max_response_length
actor_rollout_ref.model.path
actor_rollout_ref.actor.optim.lr ppo_mini_batch_size ppo_micro_batch_size_per_gpu
actor_rollout_ref.rollout.name log_prob_micro_batch_size_per_gpu tensor_model_parallel_size
actor_rollout_ref.rollout.gpu_memory_utilization
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
critic.optim.lr
critic.model.path
critic.ppo_micro_batch_size_per_gpu
algorithm.kl_ctrl.kl_coef
trainer.logger val_before_train n_gpus_per_node nnodes save_freq test_freq total_epochs
trainer.project_name experiment_name
"""
DAPO = """
data.prompt_key truncation gen_batch_size return_raw_chat filter_overlong_prompts
data.custom_cls.path name
algorithm.adv_estimator use_kl_in_reward
algorithm.filter_groups.enable metric max_num_gen_batches
algorithm.rollout_correction.rollout_is rollout_is_threshold rollout_is_batch_normalize
algorithm.rollout_correction.rollout_rs rollout_rs_threshold
actor_rollout_ref.hybrid_engine
actor_rollout_ref.model.use_remove_padding enable_gradient_checkpointing use_fused_kernels
actor_rollout_ref.model.override_config.attention_dropout embd_pdrop resid_pdrop max_position_embeddings
actor_rollout_ref.actor.strategy use_kl_loss kl_loss_coef kl_loss_type
actor_rollout_ref.actor.clip_ratio_low clip_ratio_high clip_ratio_c
actor_rollout_ref.actor.use_dynamic_bsz ppo_max_token_len_per_gpu ppo_micro_batch_size entropy_coeff grad_clip
actor_rollout_ref.actor.loss_agg_mode use_token_level_loss ulysses_sequence_parallel_size
actor_rollout_ref.actor.optim.lr_warmup_steps weight_decay
actor_rollout_ref.actor.fsdp_config.param_offload optimizer_offload fsdp_size
actor_rollout_ref.actor.policy_loss.loss_mode
actor_rollout_ref.actor.checkpoint.save_contents
actor_rollout_ref.ref.log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu log_prob_micro_batch_size
actor_rollout_ref.ref.ulysses_sequence_parallel_size
actor_rollout_ref.ref.fsdp_config.param_offload
actor_rollout_ref.rollout.n mode temperature top_p top_k calculate_log_probs multi_stage_wake_up
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu log_prob_micro_batch_size
actor_rollout_ref.rollout.enable_chunked_prefill max_num_batched_tokens
actor_rollout_ref.rollout.val_kwargs.n temperature top_p top_k do_sample
actor_rollout_ref.rollout.multi_turn.enable format tool_config_path max_user_turns max_assistant_turns
reward_model.reward_manager
reward_model.overlong_buffer.enable len penalty_factor
reward_model.reward_kwargs.overlong_buffer_cfg.enable len penalty_factor log
reward_model.reward_kwargs.max_resp_len
custom_reward_function.path name
custom_reward_function.overlong_buffer.enable len penalty_factor
trainer.default_local_dir resume_mode log_val_generations total_training_steps
async_training.staleness_threshold trigger_parameter_sync_step require_batches
async_training.partial_rollout use_rollout_log_probs
async_training.compute_prox_log_prob
rollout.total_rollout_steps total_epochs test_freq nnodes n_gpus_per_node
"""


def keys_of(text: str) -> list[str]:
    lines = (line.split() for line in text.split("\n") if line)
    return [
        key for first, *more in lines for key in (first, *(f"{first.rpartition('.')[0]}.{m}" for m in more))
    ]


def test_every_key_of_verls_quickstart_and_dapo_scripts_is_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each on a line of its own, with the key here or why there is none, and never with a guess."""
    keys = keys_of(QUICKSTART + DAPO)
    assert len(keys) > 120 and "actor_rollout_ref.actor.fsdp_config.fsdp_size" in keys
    own = ["actor_rollout_ref.rollout.temperature"]  # `rollout.temperature` is its name here, too
    assert cli.main(["train", *NAMED, *(f"{key}=1" for key in keys), f"+{own[0]}=1"]) == 2
    error = capsys.readouterr().err
    lines = dict(line.strip().split(": ", 1) for line in error.splitlines()[1:])
    assert lines.keys() == set(keys)
    assert not [
        line
        for line in lines.values()
        if not line.startswith(("in asyncrl it is ", "asyncrl has no such key: "))
    ]
    assert lines["trainer.save_freq"].startswith("in asyncrl it is checkpoint.every (")
    assert lines["data.truncation"].startswith("asyncrl has no such key: prompts are never cut")
    assert "](" not in error and "`" not in error


def test_what_the_table_names_is_there() -> None:
    known = {key for key, _ in leaves(default_tree(RunConfig))} | {"engine", "launch"}
    for keys, here, note in verl_rows():
        named = re.sub(r"=.*", "", here).split(", ") if here else []
        assert set(named) <= known and (here or note), f"{keys}: no such key here, or no reason"
    rows = [key for keys, _, _ in verl_rows() for key in keys.split(", ")]
    assert len(rows) == len(set(rows)), "a key has two answers"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["trainer.save_freq=1"], "unknown key trainer.save_freq; in asyncrl it is checkpoint.every"),
        (["actor.optim.lr=1"], "unknown key actor.optim.lr; in asyncrl it is trainer.lr"),
        (["+actor_rollout_ref={rollout: {n: 2}}"], "rollout.n; in asyncrl it is buffer.episodes"),
        (["+critic.model.use_remove_padding=true"], "use_remove_padding; asyncrl has no such key"),
        (["critic.backbone=own"], "unknown key critic.backbone; a critic is .*; remove the key$"),
        (["data.trian=1"], "unknown key data.trian; did you mean data.train"),  # a slip, and not verl's
        (["trainer.lrr=1", "trainer.nnodes=1"], r"(?s)lrr: did you mean trainer.lr.*nnodes: in asyncrl it"),
        (["kl.coef=0.001"], r"kl.coef=0.001 has no effect, because kl.where is none; add kl.where="),
    ],
)  # fmt: skip
def test_what_is_said_of_a_key(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose([*NAMED, *given])


def test_a_run_that_was_begun_with_an_idle_coefficient_can_be_read_again(tmp_path: Path) -> None:
    config = compose([*NAMED, "kl.coef=0.1", "kl.where=none"])
    (tmp_path / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    assert recompose(tmp_path, []).kl == config.kl


def test_a_coefficient_of_the_kl_goes_with_where_it_is() -> None:
    for given in (["kl.coef=0.1", "kl.where=reward"], ["kl.coef=0.1", "kl.where=none"], ["kl.coef=0"], []):
        compose([*NAMED, *given])


def test_patterns_come_after_the_keys_that_they_would_hide() -> None:
    """An exact row is looked up first; of patterns the first row wins, so a wide one stands below."""
    patterns = [key for keys, _, _ in verl_rows() for key in keys.split(", ") if "*" in key]
    for index, pattern in enumerate(patterns):
        hidden = [wide for wide in patterns[:index] if fnmatchcase(pattern.replace("*", "x"), wide)]
        assert not hidden, f"{pattern} is hidden by {hidden}"
