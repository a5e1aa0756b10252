"""Services beside a job."""
