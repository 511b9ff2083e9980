"""Two rewards for an order: `exact` pays if everything is sold, `partial` also pays for steps on the way."""

COUNTED = 0.3  # for counting the ordered part


def sold(ground_truth, extra_info):
    """Return the fraction of the ordered part that was sold; 0 if any other part was touched."""
    before = extra_info["stock"]
    after = extra_info["agent_result"]["stock"]
    if any(after[part] != before[part] for part in before.keys() - {ground_truth}):
        return 0.0
    return 1 - after[ground_truth] / before[ground_truth]


def exact(data_source, solution_str, ground_truth, extra_info):
    return float(sold(ground_truth, extra_info) == 1.0)


def partial(data_source, solution_str, ground_truth, extra_info):
    counted = float(ground_truth in extra_info["agent_result"]["counted"])
    fraction = sold(ground_truth, extra_info)
    return {
        "score": COUNTED * counted + (1 - COUNTED) * fraction,
        "components": {"counted": counted, "sold": fraction},
    }
