DELETE FROM schema_compat WHERE migration = '20261201000122';
DROP TABLE scaler_claims;
