"""What becomes of each field of a `GenerationConfig` beside a drafter: every one is listed once."""

from typing import Any

SERVED = frozenset(
    """
    bad_words_ids begin_suppress_tokens bos_token_id cache_config cache_implementation decoder_start_token_id do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id guidance_scale length_penalty max_cache_len
    max_length max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_beams
    num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id
    prefill_chunk_size remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate sequence_bias
    speculation_type stop_strings suppress_tokens temperature top_h top_k top_p typical_p use_cache watermarking_config
    """.split()  # noqa: SIM905  (fifty lines, else)
)
"""as in plain decoding, or by plain decoding where speculation cannot, which is said"""

OTHER_MODES: dict[str, Any] = {
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "force_words_ids": None,
    "constraints": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "token_healing": False,
}
"""refused, as another way of decoding: each with the value that asks for nothing"""

OTHER_SPECULATION: dict[str, Any] = {
    "assistant_confidence_threshold": 0.4,
    "assistant_early_exit": None,
    "assistant_ensemble_weight": None,
    "assistant_lookbehind": 10,
    "max_matching_ngram_size": None,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "prompt_lookup_num_tokens": None,
    "target_lookbehind": 10,
    "use_mtp": False,
}
"""refused, as transformers' own speculation: each with the value that transformers fills in by itself (its pipelines
do), which asks for nothing"""

WITHOUT_EFFECT = frozenset(
    """
    compile_config continuous_batching_config disable_compile is_assistant low_memory transformers_version
    """.split()  # noqa: SIM905
)
"""of no effect; that rounds are not compiled is said where plain decoding would be"""
