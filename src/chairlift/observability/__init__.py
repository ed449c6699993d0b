"""Request tracking, metrics, explanations of waiting times, trace recording and `chairlift top`."""
