"""A reward from the result of the program."""


def submitted(data_source, solution_str, ground_truth, extra_info):
    """1 for the requested file, and a quarter for a command that ran."""
    result = extra_info.get("agent_result") or {}  # none where a limit refused it, or its time was up
    right = result.get("submission") == ground_truth
    ran = result.get("commands", 0) > 0
    return {"score": 1.0 if right else 0.25 * ran, "components": {"submitted": right, "ran": ran}}
