//! Roles and permissions of the installation.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A role of a person or token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Reads.
    Auditor,
    /// Runs the installation.
    Admin,
    /// Everything, with keys, tokens and members.
    Owner,
}

impl Role {
    /// The word in storage and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auditor => "auditor",
            Self::Admin => "admin",
            Self::Owner => "owner",
        }
    }

    /// Whether this role has `permission`.
    pub fn has(self, permission: Permission) -> bool {
        self >= permission.least_role()
    }

    /// Every permission of this role.
    pub fn permissions(self) -> impl Iterator<Item = Permission> {
        Permission::ALL.iter().copied().filter(move |p| self.has(*p))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A word that is neither a role nor a permission.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {what}; expected one of: {expected}")]
pub struct UnknownName {
    text: String,
    what: &'static str,
    expected: String,
}

impl UnknownName {
    pub(crate) fn new<'a>(text: &str, what: &'static str, expected: impl Iterator<Item = &'a str>) -> Self {
        let expected = expected.collect::<Vec<_>>().join(", ");
        Self { text: text.chars().take(80).collect(), what, expected }
    }
}

impl FromStr for Role {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let all = [Self::Owner, Self::Admin, Self::Auditor];
        let found = all.into_iter().find(|r| r.as_str() == text);
        found.ok_or_else(|| UnknownName::new(text, "role", all.iter().map(|r| r.as_str())))
    }
}

/// Whether `role` has `permission`. The whole policy is the table of [`Permission`].
pub fn role_has(role: Role, permission: Permission) -> bool {
    role.has(permission)
}

macro_rules! permissions {
    ($($role:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* })*) => {
        /// One thing that a route or command needs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Permission {
            $($($(#[$doc])* #[serde(rename = $word)] $variant,)*)*
        }

        impl Permission {
            /// Every permission, readers' first.
            pub const ALL: &'static [Self] = &[$($(Self::$variant,)*)*];

            /// The word in JSON and messages, `thing.verb`.
            pub const fn as_str(self) -> &'static str {
                match self { $($(Self::$variant => $word,)*)* }
            }

            /// The least role that has it.
            pub const fn least_role(self) -> Role {
                match self { $($(Self::$variant => Role::$role,)*)* }
            }
        }
    };
}

permissions! {
    Auditor {
        /// Runs, jobs, steps and their logs.
        RunRead = "run.read",
        /// Workflow definitions and validation.
        WorkflowRead = "workflow.read",
        /// Contexts and their variables.
        ContextRead = "context.read",
        /// Sources without their secrets.
        SourceRead = "source.read",
        /// Registered workflows.
        RegistrationRead = "registration.read",
        /// Deliveries without their bodies.
        EventLogRead = "event_log.read",
        /// Dead letters.
        EventDlqRead = "event_dlq.read",
        /// The access log.
        AccessLogRead = "access_log.read",
        /// The configuration log.
        AuditRead = "audit.read",
        /// Trust policy and directory, held runs.
        CiTrustRead = "ci_trust.read",
        /// Agents, hosts, scalers, packages.
        FleetRead = "fleet.read",
        /// Members of the cluster.
        ClusterRead = "cluster.read",
        /// People.
        MemberRead = "member.read",
        /// Settings of the organisation.
        OrgSettingsRead = "org_settings.read",
    }
    Admin {
        /// Start a run by hand.
        RunTrigger = "run.trigger",
        /// Cancel a run.
        RunCancel = "run.cancel",
        /// Run again.
        RunRerun = "run.rerun",
        /// Approve or reject.
        HeldRunDecide = "held_run.decide",
        /// Change trust policy and directory.
        CiTrustAdmin = "ci_trust.admin",
        /// Create a context.
        ContextCreate = "context.create",
        /// Change a context.
        ContextUpdate = "context.update",
        /// Delete a context.
        ContextDelete = "context.delete",
        /// Names and versions of secrets, never values.
        SecretRead = "secret.read",
        /// Set a secret.
        SecretWrite = "secret.write",
        /// Delete a secret.
        SecretDelete = "secret.delete",
        /// Read the value of a secret; always audited.
        SecretReveal = "secret.reveal",
        /// Add, change and remove sources.
        SourceManage = "source.manage",
        /// Enable, disable and refresh registrations.
        RegistrationManage = "registration.manage",
        /// Change settings of the organisation.
        OrgSettingsManage = "org_settings.manage",
        /// Emit an event.
        EventEmit = "event.emit",
        /// Read the body of a delivery.
        EventLogReadPayload = "event_log.read_payload",
        /// Deliver again.
        EventLogManage = "event_log.manage",
        /// Retry and discard dead letters.
        EventDlqManage = "event_dlq.manage",
        /// Create and revoke agent tokens.
        AgentTokenManage = "agent_token.manage",
        /// Change the host roster.
        HostManage = "host.manage",
        /// Drain, resume and remove agents and scalers.
        FleetManage = "fleet.manage",
        /// Collect diagnostic bundles.
        FleetCollect = "fleet.collect",
        /// Drain an orchestrator.
        OrchestratorDrain = "orchestrator.drain",
        /// Change the configuration.
        ConfigWrite = "config.write",
        /// Issue join tokens.
        ClusterJoin = "cluster.join",
        /// Fire a schedule by hand.
        ScheduledJobTrigger = "scheduled_job.trigger",
        /// Try an attestation again.
        AttestationRetry = "attestation.retry",
    }
    Owner {
        /// Create and revoke admin tokens.
        TokenManage = "token.manage",
        /// Rotate keys.
        KeyRotate = "key.rotate",
        /// Migrate the database.
        DbMigrate = "db.migrate",
        /// Delete data for good.
        MaintenancePurge = "maintenance.purge",
        /// Change the cluster.
        ClusterManage = "cluster.manage",
        /// Change people and their roles.
        MemberManage = "member.manage",
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Permission {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.iter().copied().find(|p| p.as_str() == text);
        found.ok_or_else(|| UnknownName::new(text, "permission", Self::ALL.iter().map(|p| p.as_str())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_hold_what_the_table_says() {
        assert_eq!(Role::Auditor.permissions().count(), 14);
        assert!(Role::Auditor.permissions().all(|p| p.as_str().ends_with(".read")));
        assert_eq!(Role::Owner.permissions().count(), Permission::ALL.len());
        let table = [
            (Permission::RunRead, true, true),
            (Permission::SecretRead, false, true),
            (Permission::HeldRunDecide, false, true),
            (Permission::TokenManage, false, false),
            (Permission::MemberManage, false, false),
        ];
        for (permission, auditor, admin) in table {
            assert_eq!(role_has(Role::Auditor, permission), auditor, "{permission}");
            assert_eq!(role_has(Role::Admin, permission), admin, "{permission}");
            assert!(role_has(Role::Owner, permission));
        }
    }

    #[test]
    fn names_round_trip() {
        for permission in Permission::ALL {
            assert_eq!(permission.as_str().parse::<Permission>(), Ok(*permission));
        }
        for role in [Role::Auditor, Role::Admin, Role::Owner] {
            assert_eq!(role.as_str().parse::<Role>(), Ok(role));
        }
        let error = "root".parse::<Role>().unwrap_err().to_string();
        assert_eq!(error, "`root` is not a role; expected one of: owner, admin, auditor");
    }
}
