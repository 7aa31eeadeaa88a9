#!/bin/sh
# Write the passwords and logins of compose.yaml that docker/.env lacks, and close the file to other users.
set -eu
cd "$(dirname "$0")"

umask 077
touch .env
chmod 600 .env
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
# Letters and digits only: passwords become part of URLs.
for name in POSTGRES_PASSWORD PREFECT_DB_PASSWORD MLFLOW_DB_PASSWORD REDIS_PASSWORD LAKEVISION_API_KEY; do
    grep -q "^$name=" .env || echo "$name=$(random)" >>.env
done
for name in PREFECT_AUTH MLFLOW_AUTH; do
    grep -q "^$name=" .env || echo "$name=lakevision:$(random)" >>.env
done
