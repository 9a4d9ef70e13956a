"""The engine process. It owns one device and runs the step loop, the models, the scheduler, and the paging of sessions'
KV."""
