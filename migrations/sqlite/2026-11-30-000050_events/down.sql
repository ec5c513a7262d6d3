DELETE FROM schema_compat WHERE migration = '20261130000050';
DROP TABLE event_trust;
DROP TABLE schedule_state;
DROP TABLE events;
