"""What makes a process a service: words with the service manager, the watchdog, logs, reload, signals."""
