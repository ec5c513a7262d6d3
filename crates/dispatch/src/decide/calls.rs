//! Which calls an agent may make on behalf of its jobs, besides those about the jobs themselves.

use super::gates::Refused;

/// A call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Lists hosts.
    QueryInventory,
    /// Shows a host.
    GetHost,
    /// Announces the restart of its own host.
    RequestReboot,
    /// Calls it off.
    CancelReboot,
}

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// It looks.
    Read,
    /// It changes something.
    Write,
}

impl Role {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

impl Call {
    /// Its name, as people know it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::QueryInventory => "inventory.query",
            Self::GetHost => "inventory.get",
            Self::RequestReboot => "host.request_reboot",
            Self::CancelReboot => "host.cancel_reboot",
        }
    }

    /// The role that it needs.
    pub const fn role(self) -> Role {
        match self {
            Self::QueryInventory | Self::GetHost => Role::Read,
            Self::RequestReboot | Self::CancelReboot => Role::Write,
        }
    }
}

/// The role of an agent. A machine that a scaler made for a job has nothing that outlives it, so that its jobs only look.
pub const fn role_of(scaler_managed: bool) -> Role {
    if scaler_managed { Role::Read } else { Role::Write }
}

/// Judges a call.
///
/// # Errors
/// [`Refused`], whose text may be shown to the job.
pub fn allowed(call: Call, role: Role) -> Result<(), Refused> {
    if role >= call.role() {
        return Ok(());
    }
    let (name, needs, has) = (call.as_str(), call.role().as_str(), role.as_str());
    Err(Refused::unauthorized(format!("{name} needs the role `{needs}` and this agent has `{has}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_of_a_scaler_look_and_change_nothing() {
        for (call, reads) in [
            (Call::QueryInventory, true),
            (Call::GetHost, true),
            (Call::RequestReboot, false),
            (Call::CancelReboot, false),
        ] {
            assert!(allowed(call, role_of(false)).is_ok());
            assert_eq!(allowed(call, role_of(true)).is_ok(), reads, "{}", call.as_str());
        }
        let refused = allowed(Call::RequestReboot, role_of(true)).unwrap_err();
        assert_eq!(refused.message, "host.request_reboot needs the role `write` and this agent has `read`");
    }
}
