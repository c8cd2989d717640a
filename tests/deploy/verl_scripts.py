"""Launch scripts as users of verl have them."""

COMMAND = "python3 -m verl.trainer.main_ppo "
GRPO = r"""
set -x
# a comment with key.like=this
python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files=$HOME/data/gsm8k/train.parquet \
  data.val_files=$HOME/data/gsm8k/test.parquet \
  data.train_batch_size=1024 \
  data.truncation='error' \
  actor_rollout_ref.model.path=Qwen/Qwen3-8B \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.fsdp_config.param_offload=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  trainer.logger='["console","wandb"]' \
  trainer.n_gpus_per_node=8 \
  trainer.test_freq=-1 \
  trainer.total_epochs=15 $@
"""
DAPO = r"""
#!/usr/bin/env bash
set -xeuo pipefail
exp_name='DAPO-32B'
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
overlong_buffer_len=$((1024 * 4))
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
NNODES=${NNODES:-16}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-32B"}
use_dynamic_bsz=True
ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \
    -- python3 -m recipe.dapo.main_dapo \
    algorithm.adv_estimator=grpo \
    data.gen_batch_size=${gen_prompt_bsz} \
    data.train_batch_size=${train_prompt_bsz} \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz} \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    algorithm.filter_groups.enable=True \
    algorithm.rollout_correction.rollout_is=sequence \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    algorithm.rollout_correction.rollout_is_batch_normalize=true \
    algorithm.rollout_correction.rollout_rs="seq_mean_k1" \
    algorithm.rollout_correction.rollout_rs_threshold="0.99_1.02" \
    actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=${overlong_buffer_len} \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    trainer.experiment_name="${exp_name}" \
    trainer.nnodes="${NNODES}" 2>&1 | tee log.txt
"""
PPO = r"""
train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
python3 -m verl.trainer.main_ppo data.train_files="$train_files" data.train_batch_size=512 \
    algorithm.adv_estimator=gae algorithm.lam=0.95 actor_rollout_ref.model.path=/models/a \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.actor.clip_ratio=0.1 \
    critic.optim.lr=1e-5 critic.cliprange_value=0.4 critic.model.enable_gradient_checkpointing=True \
    trainer.critic_warmup=3 trainer.save_freq=-1
"""
