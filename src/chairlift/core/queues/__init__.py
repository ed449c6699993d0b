"""The order of the queue and of the running batch, one file for each policy; `queue_selection` chooses one."""
