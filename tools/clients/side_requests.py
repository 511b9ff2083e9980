"""Tells requests for a commit message: `rollout.untrained_agents=[side_requests.py:writes_commit_message]`"""


def writes_commit_message(request):
    return "commit message" in request.messages[0].content
