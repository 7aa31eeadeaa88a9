"""The wait of the server's automation for heartbeats, which begins anew when the server starts."""

import sqlalchemy as sa
from prefect.server.database import provide_database_interface
from prefect.types._datetime import now

from deployments.heartbeats import NAME


async def wait_anew_for_heartbeats() -> None:
    """Restart the time that the automation waits for each run, before the server starts.

    No heartbeat arrives while the server is away: without this, an outage longer than that time would crash all runs.
    """
    database = provide_database_interface()
    engine = await database.engine()
    try:
        async with engine.connect() as connection:
            if not await connection.run_sync(lambda inner: sa.inspect(inner).has_table("automation_bucket")):
                return  # the first start, before the tables are created
        async with database.session_context(begin_transaction=True) as session:
            found = await session.execute(sa.select(database.Automation).where(database.Automation.name == NAME))
            for automation in found.scalars():
                bucket = database.AutomationBucket
                end = now("UTC") + automation.trigger.within
                await session.execute(
                    sa.update(bucket).where(bucket.automation_id == automation.id, bucket.end < end).values(end=end)
                )
    finally:
        await engine.dispose()  # its connections belong to the event loop of this call
