//! The limit of the command, from the arguments or a file.

use std::{path::Path, time::Duration};

use tower_turnstile::{
    Acquire, AcquireError, AcquireErrorKind, ConfigError, Limit, Limiter, config::LiveConfig,
};
use tower_turnstile_operate::{Registration, beside::Beside};

use super::args::RunArgs;
use crate::{
    args::Args,
    code,
    commands::CommandError,
    in_force::{Wanted, compare, in_force},
    source,
};

/// The limit and its store.
pub(super) struct SlotSource<'a> {
    job: &'a RunArgs,
    limit: Limit,
    /// Maximum wait for a slot.
    pub(super) wait: Duration,
    pub(super) limiter: Limiter,
    pub(super) beside: Beside,
    is_fair: bool,
    /// The file with the limit, unless the arguments declare it.
    live: Option<LiveConfig>,
}

impl<'a> SlotSource<'a> {
    pub(super) async fn connect(args: &Args, job: &'a RunArgs) -> Result<Self, CommandError> {
        match (&job.source.config, job.source.concurrent) {
            (Some(path), _) => Self::of_file(args, job, path).await,
            (None, slots) => Self::of_arguments(args, job, slots).await,
        }
    }

    async fn of_arguments(
        args: &Args,
        job: &'a RunArgs,
        slots: Option<u32>,
    ) -> Result<Self, CommandError> {
        let name = &*job.limit;
        let given = slots.map(|slots| Limit::try_concurrent(name.to_owned(), slots));
        given.transpose()?;
        let builder = Limiter::builder().namespace(&args.namespace).operable();
        let url = args.store()?;
        let limiter = builder.connect(url).await.map_err(unusable)?;
        let beside = Beside::new(&limiter, url, &args.namespace)?;
        let wanted = Wanted {
            slots,
            is_fair: job.tenant.as_ref().map(|_| true),
            is_forced: job.force,
            names: ("--concurrent", "--tenant"),
        };
        let declared = match in_force(&beside, name, wanted).await {
            Ok(declared) => declared,
            Err(error) => {
                // A store that has not answered would not answer this either.
                if error.code != code::NO_SLOT {
                    limiter.shutdown(Duration::ZERO).await;
                }
                return Err(error);
            }
        };
        let limit = Limit::try_concurrent(name.to_owned(), declared.max)?;
        let limit = limit.fallback(job.fallback.into());
        let limit = if declared.fair {
            // A fair limit is declared with a wait. The wait of this command, which may be none, is set by `ask`.
            let declared = limit.wait_up_to(Limit::MAX_WAIT).fair();
            let semaphore = limiter.semaphore(declared, &*job.key)?;
            semaphore.limit().clone()
        } else {
            limit
        };
        Ok(Self {
            job,
            limit,
            wait: job.wait.unwrap_or(Limit::MAX_WAIT),
            limiter,
            beside,
            live: None,
            is_fair: declared.fair,
        })
    }

    /// The limit, the caller's value and the store are the same as in services with this file. The fallback is the
    /// command's own.
    async fn of_file(args: &Args, job: &'a RunArgs, path: &Path) -> Result<Self, CommandError> {
        let mut config = source::read(args, path).await?;
        let Some(declared) = config.limits.get_mut(&job.limit) else {
            let message = format!("{}: there is no limit `{}`", path.display(), job.limit);
            return Err(CommandError::new(code::CONFIG, message));
        };
        declared.fallback = Some(job.fallback.into());
        let wait = job.wait.or(declared.wait()).unwrap_or_default();
        let live = LiveConfig::connect(&config).await;
        let live = live.map_err(|error| source::faulty(&path.display().to_string(), &error))?;
        let limit = live.limit(&job.limit).expect("it is in the file");
        let limiter = live.limiter().clone();
        let (url, namespace) = source::store(&config);
        let beside = Beside::new(&limiter, &url, &namespace);
        // In memory there is nobody to share a limit with.
        let beside = beside.map_err(|error| CommandError::new(code::CONFIG, error.to_string()))?;
        let declared = beside.declared(&job.limit);
        if let Some(declared) = declared {
            compare(&beside, &job.limit, declared).await;
        }
        Ok(Self {
            job,
            limit,
            wait,
            limiter,
            beside,
            live: Some(live),
            is_fair: declared.is_some_and(|declared| declared.fair),
        })
    }

    /// Requests a slot, and waits up to this long.
    pub(super) fn ask(&self, wait: Duration) -> Result<Acquire, CommandError> {
        let (limit, key) = (self.limit.clone().wait_up_to(wait), &*self.job.key);
        // Without a tenant too, since the file may require one.
        let tenant = self.job.tenant.as_deref();
        let tenant = tenant.or(self.is_fair.then_some(""));
        let semaphore = match (&self.live, tenant) {
            (Some(live), Some(tenant)) => live.tenant_semaphore(&limit, key, tenant),
            (Some(live), None) => live.semaphore(&limit, key),
            (None, tenant) => {
                let semaphore = self.limiter.semaphore(limit, key)?;
                Ok(match tenant {
                    Some(tenant) => semaphore.tenant(tenant)?,
                    None => semaphore,
                })
            }
        };
        let semaphore =
            semaphore.map_err(|error| CommandError::new(code::CONFIG, error.to_string()))?;
        let semaphore = match self.job.share {
            Some(share) => semaphore.share(share)?,
            None => semaphore,
        };
        let semaphore = semaphore.label(self.job.label());
        Ok(semaphore.acquire_many(self.job.weight))
    }
}

impl SlotSource<'_> {
    /// The error of a command without a slot. If the store is at fault, with its address and the cause.
    pub(super) async fn refusal(&self, error: &AcquireError) -> CommandError {
        let (code, of_store) = match error.kind() {
            AcquireErrorKind::InvalidWeight => (code::WRONG_CALL, false),
            AcquireErrorKind::Misconfigured => (code::CONFIG, true),
            kind => (code::NO_SLOT, kind == AcquireErrorKind::Unavailable),
        };
        let mut message = error.to_string();
        if of_store {
            let (how, limit) = (Registration::Join, &self.job.limit);
            message += &match self.beside.declare(how, limit, None).await {
                Err(cause) => format!(": {cause}"),
                // A command has no log of its own.
                Ok(_) => "; run `turnstile doctor`".to_owned(),
            };
        }
        CommandError::new(code, message)
    }
}

/// The store refuses, so no command would ever get a slot.
fn unusable(error: ConfigError) -> CommandError {
    let mut error = CommandError::from(error);
    if error.code != code::WRONG_CALL {
        error.code = code::CONFIG;
    }
    error
}
