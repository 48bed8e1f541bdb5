"""What the arguments of other projects' reward functions are called here (AReaL, verl, TRL, OpenRLHF, NeMo, slime,
verifiers), and which keys of a dict are another project's name for the whole reward.

A function that another trainer called is told all of its differences at once, before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_COMPLETION = "completion (one text: the function is called for each completion by itself)"
_ANSWER = "answer (the column that train_dataset.answer_key names)"
_RECORD = "record (a dict of all columns)"
_QUESTION = "record (the question is one of its columns)"
_GROUP = "group (the texts of all completions of the prompt)"
_NOTHING = "nothing: it is not given"
_LINES = {
    _COMPLETION: (
        "assistant_response completions completion_str completion_text generated generated_text generation "
        "generations llm_response model_output model_response output output_str output_text outputs pred predict "
        "predict_str prediction prediction_str predictions predicts preds response response_str response_text "
        "responses sequence_str solution_str solution_strs solutions_str text texts"
    ),
    _ANSWER: (
        "answers correct_answer correct_answers expected expected_answer expected_answers gold gold_answer "
        "gold_solution golds ground_truth ground_truths groundtruth gt gts label labels reference reference_answer "
        "reference_answers reference_solution references solution solutions target targets true_answer"
    ),
    _RECORD: (
        "data data_item doc example examples extra_env_info extra_info extra_infos info infos item items meta metadata "
        "reward_inputs reward_model row rows sample samples"
    ),
    _QUESTION: (
        "conversation input input_text inputs instruction instructions messages problem problems prompt prompt_str "
        "prompt_text prompts queries query question questions"
    ),
    "record['data_source'] where that is a column": "data_source data_sources",
    "prompt_id": "id idx index prompt_index prompt_uid query_id question_id sample_id sample_index uid uids",
    "token_ids (of the completion)": (
        "completion_ids completion_token_ids completion_tokens completions_ids output_ids output_token_ids "
        "output_tokens response_ids response_token_ids response_tokens tokens"
    ),
    "finish_reason ('stop' or 'length')": "finish_reasons finished is_finished stop_reason truncated",
    _GROUP: "all_completions all_responses group_completions group_responses",
    _NOTHING: (
        "args completion_logprobs config env environment log_extra log_metric logprobs parser prompt_ids prompt_tokens "
        "prompts_ids reward_model_tokenizer self state task tokenizer trainer_state"
    ),
}
OURS: Mapping[str, str] = {name: ours for ours, names in _LINES.items() for name in names.split()}
"""By another project's name, what is had in its place."""

_WORDS_OF_THE_WHOLE = (
    "aggregate aggregated average avg combined final mean overall return reward rewards scalar score scores sum summed "
    "total weighted"
)
"""A key of these words alone is no part: `final_reward`, and neither `format_reward` nor `score_2`."""
_WHOLE_ALONE = ("result", "value")
"""Of several words they name a part: `result_reward` beside `process_reward`."""


def ours_for(name: str) -> str:
    """What takes the place of an argument that is not given here."""
    return OURS.get(name, f"record[{name!r}] where that is a column of the data, else nothing")


def would_be_lacking(name: str, default: object) -> bool:
    """Does an argument with a default wait for what another project gives? Empty ones do; `target=500` and a tokenizer
    of its own are the function's options."""
    is_empty = default is None or (isinstance(default, str | dict | list | tuple) and not default)
    return is_empty and OURS.get(name, _NOTHING) != _NOTHING


def is_whole_reward(key: object) -> bool:
    """Do other projects call the whole reward so, beside its parts?"""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", str(key))]
    return words in [[one] for one in _WHOLE_ALONE] or (
        bool(words) and all(word in _WORDS_OF_THE_WHOLE.split() for word in words)
    )
