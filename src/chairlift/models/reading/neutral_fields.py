"""Fields of checkpoints that have no influence on inference. A reader must read every other field."""

from __future__ import annotations

from typing import Final


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEUTRAL_GGUF: Final = _names("rope.scaling.finetuned rope.scaling.original_context_length tensor_data_layout")
"""Keys below the architecture's name. The original context length affects YaRN scaling only, whose reader reads it."""

_PROVENANCE: Final = _names("""
    _commit_hash _name_or_path architectures auto_map auto_mapping base_model base_model_name_or_path created_by
    finetuning_task is_llama_config library_name license model_name model_type task_specific_params
    transformers.js_config transformers_version unsloth_fixed unsloth_version
""")

_TRAINING: Final = _names("""
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal attention_dropout
    attention_probs_dropout_prob classifier_dropout deterministic_flash_attn initializer_cutoff_factor mlp_dropout
    reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
    attn_implementation dropout embd_pdrop embedding_dropout fsdp fused_cross_entropy fused_norm fused_swiglu
    gradient_checkpointing hidden_dropout hidden_dropout_prob init_std initializer_range layerdrop neftune_noise_alpha
    output_router_logits pretraining_tp resid_pdrop router_aux_loss_coef router_jitter_noise use_cache use_flash_attn
""")

_TOKENIZER: Final = _names("""
    bos_token chat_template decoder_start_token_id eos_token forced_bos_token_id forced_eos_token_id pad_token
    cls_token_id pad_token_id prefix
    sep_token_id suppress_tokens begin_suppress_tokens tokenizer_class tokenizer_model_max_length
    unk_token_id
""")

_OUTPUT: Final = _names("""
    dtype id2label label2id num_labels output_attentions output_hidden_states problem_type return_dict
    return_dict_in_generate torch_dtype torchscript use_bfloat16
""")

_ENCODERS: Final = _names("""
    add_cross_attention chunk_size_feed_forward cross_attention_hidden_size is_decoder is_encoder_decoder pruned_heads
    tf_legacy_loss tie_encoder_decoder
""")

_GENERATION: Final = _names("""
    bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty temperature
    top_k top_p typical_p
""")

NEUTRAL_HF: Final = _PROVENANCE | _TRAINING | _TOKENIZER | _OUTPUT | _ENCODERS | _GENERATION
"""Keys of `config.json`. The sampling parameters in `_GENERATION` come from the request and the server's defaults."""

NEUTRAL_QUANTIZATION: Final = _names("""
    backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset do_fuse
    exllama_config fuse_max_seq_len global_compression_ratio lm_head max_input_length meta model_file_base_name
    model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse mse
    observer observer_kwargs offload_to_disk pad_token_id quantization_status scale_dtype scale_fmt static_groups
    tokenizer true_sequential use_cuda_fp16 use_exllama version zp_dtype
""")
"""Keys below `quantization_config`. `scale_fmt` concerns activations, and the tensors show whether the LM head is
quantized."""
