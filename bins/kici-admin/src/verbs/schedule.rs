//! `schedule` and `registration`.

use clap::Subcommand;
use kici_api::dto::bus::{ChangeRegistration, RegistrationView, ScheduleView, TriggerSchedule};
use kici_engine::ids::RegistrationId;

use super::Context;
use crate::exit::Failure;
use crate::output::{Column, Output, fields, optional, text};

/// Schedules of registered workflows.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List them, by repository and workflow
    List,
    /// Fire one now; its own times stay as they are
    Trigger {
        /// The registration, from `schedule list`
        registration: RegistrationId,
        /// Which one, where the workflow has several
        #[arg(long)]
        cron: Option<String>,
        /// The same key gives the same event
        #[arg(long)]
        idempotency_key: Option<String>,
    },
}

/// Registered workflows: those of default branches, which events without a commit of their own can start.
#[derive(Debug, Subcommand)]
pub(crate) enum Registration {
    /// List them, by repository and name
    List,
    /// Let one start runs again
    Enable {
        /// Its id
        registration: RegistrationId,
    },
    /// Keep one from starting runs; its schedules do not fire meanwhile and nothing is made up for
    Disable {
        /// Its id
        registration: RegistrationId,
    },
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::List => out.page(&client.schedules().await?, "no schedules", &columns(out))?,
        Verb::Trigger { registration, cron, idempotency_key } => {
            let request = TriggerSchedule { cron };
            let fired = client.trigger_schedule(registration, &request, idempotency_key.as_deref()).await?;
            out.document(&fired, |_| fired.event_id.to_string())?;
        }
    }
    Ok(0)
}

/// Runs the command on registrations.
pub(crate) async fn registration(context: &Context, verb: Registration) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    let changed = match verb {
        Registration::List => {
            out.page(&client.registrations().await?, "no registered workflows", &registered(out))?;
            return Ok(0);
        }
        Registration::Enable { registration } => (registration, true),
        Registration::Disable { registration } => (registration, false),
    };
    let (id, enabled) = changed;
    let view = client.change_registration(id, &ChangeRegistration { enabled }).await?;
    out.document(&view, |_| {
        fields(&[
            ("registration", view.id.to_string()),
            ("workflow", view.workflow.clone()),
            ("repository", view.repo.clone()),
            ("enabled", view.enabled.to_string()),
        ])
    })?;
    Ok(0)
}

fn columns(out: &Output) -> Vec<Column<'_, ScheduleView>> {
    vec![
        ("REGISTRATION", Box::new(|s| text(s.registration_id))),
        ("REPOSITORY", Box::new(|s| text(&s.repo))),
        ("WORKFLOW", Box::new(|s| text(&s.workflow))),
        ("CRON", Box::new(|s| text(&s.cron))),
        ("ZONE", Box::new(|s| text(&s.timezone))),
        ("NEXT", Box::new(|s| text(next(out, s)))),
        ("LAST", Box::new(|s| text(out.time(s.last_fired_at)))),
    ]
}

fn next(out: &Output, schedule: &ScheduleView) -> String {
    match (&schedule.problem, schedule.enabled) {
        (Some(problem), _) => problem.clone(),
        (None, false) => "disabled".to_owned(),
        (None, true) => out.time(schedule.next_at),
    }
}

fn registered(out: &Output) -> Vec<Column<'_, RegistrationView>> {
    vec![
        ("REGISTRATION", Box::new(|r| text(r.id))),
        ("REPOSITORY", Box::new(|r| text(&r.repo))),
        ("WORKFLOW", Box::new(|r| text(&r.workflow))),
        ("TRIGGERS", Box::new(|r| text(r.trigger_types.join(", ")))),
        ("BRANCH", Box::new(|r| optional(r.default_branch.as_ref()))),
        ("ENABLED", Box::new(|r| text(r.enabled))),
        ("UPDATED", Box::new(|r| text(out.time(Some(r.updated_at))))),
    ]
}
